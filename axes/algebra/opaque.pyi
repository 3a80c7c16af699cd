from torch import dtype as Dtype
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
from torch.distributed.tensor.placement_types import Placement as Placement

__all__ = ["DeviceMesh", "Dtype", "Placement", "ProcessGroup"]
