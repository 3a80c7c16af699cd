"""A gradient scaler for float16, whose ranks skip a step together or not at all.

    with axes.init_mesh("pp=2 dp=2 tp=2"):
        scaler = axes.nn.GradScaler(device="cuda")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    axes.nn.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

torch's scaler looks for overflows in DTensors by the mesh and the placements of the first gradient. An
overflow in one rank's expert, or in one pipeline stage, is unknown to the others: some ranks skip the
step, some take it, and their scales part. Here each rank looks at its own shards, and one all-reduce of
one number over the whole mesh tells all of them.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch

from axes.algebra.cost import float_of
from axes.algebra.errors import ShardingError, shown
from axes.algebra.mesh import Mesh
from axes.algebra.scopes import required_mesh
from axes.algebra.sizes import checked_flag, whole_number
from axes.nn.layers import checked_place
from axes.nn.local_gradients import by_device_and_dtype, distinct, local_tensor, settled_gradient
from axes.runtime import torch_private
from axes.runtime.lines import all_reduce, line_of
from axes.runtime.writes import count_writes


class GradScaler(torch_private.UnscalingByMethod):
    """As `torch.amp.GradScaler`; all ranks of a mesh agree on whether a gradient overflowed.

    `mesh` is the ambient mesh by default, and has every rank whose steps belong together: pipeline stages
    too. All its ranks call `unscale_` and `step` for as many optimizers, in the same order; a rank that
    computes no loss needn't call `scale`. Everything else is torch's: `device`, `init_scale`,
    `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`, and a state dict that torch's scaler
    loads. Gradients are plain tensors or DTensors on any meshes; a pending one is resolved first.

    Raises `MeshError` where there is no mesh, unless the scaler isn't enabled. `unscale_` raises
    `ValueError` for float16 gradients, as torch's does: parameters are float32, and autocast makes float16.

    >>> import axes
    >>> with axes.simulate(4), axes.init_mesh("dp=2 tp=2"):
    ...     scaler = GradScaler(device="cpu", init_scale=8.0)
    >>> scaler.scale(torch.ones(2))
    tensor([8., 8.])
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        mesh: Mesh | None = None,
    ):
        enabled = checked_flag("axes.nn.GradScaler: enabled", enabled)
        _check_arguments(enabled, device, init_scale, growth_factor, backoff_factor, growth_interval)
        factors = map(float_of, (init_scale, growth_factor, backoff_factor))
        super().__init__(device, *factors, growth_interval, enabled)
        self.mesh = required_mesh(mesh, "axes.nn.GradScaler") if self.is_enabled() else mesh
        self.device_type = device
        self._make_scale()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_scale()

    def _make_scale(self) -> None:
        # torch makes the scale at the first loss, which a stage in the middle of a pipeline never sees.
        if self.is_enabled():
            self.scale(torch.ones((), device=self.device_type))

    def unscaled(
        self, optimizer: torch.optim.Optimizer, inverse_scale: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's shards of the gradients; 1 by device where any rank's shard isn't finite."""
        assert self.mesh is not None, "an enabled scaler has a mesh"
        settled = _settled_gradients(optimizer)
        gradients = [x.values() if x.is_sparse else local_tensor(x) for x in settled]
        if not allow_fp16 and any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("the gradients to unscale are float16; keep the parameters in float32")
        found = {inverse_scale.device: torch.zeros((), dtype=torch.float32, device=inverse_scale.device)}
        for group in by_device_and_dtype(gradients):
            device = group[0].device
            flag = found.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
            torch_private.unscale_all(group, flag, inverse_scale.to(device))
        count_writes(settled)
        somewhere = torch.stack([flag.to(self.mesh.binding.device_type) for flag in found.values()]).amax()
        everyone = line_of(self.mesh, self.mesh.axis_names)
        if everyone.size > 1:
            somewhere = all_reduce(somewhere, "max", everyone)
        return {device: somewhere.to(device, copy=True) for device in found}


def _check_arguments(
    enabled: bool, device: object, scale: object, growth: object, backoff: object, interval: object
) -> None:
    """`ShardingError` for what torch would take and fail with at a later step, or refuse by an assertion."""
    if not isinstance(device, str):
        raise ShardingError(f"axes.nn.GradScaler: device is the name of a device type; found {shown(device)}")
    if enabled and checked_place(device).type == "meta":
        raise ShardingError("axes.nn.GradScaler: device is where gradients are; found 'meta'")
    most = torch.finfo(torch.float32).max  # of which a scale is
    bounds = {"init_scale": (scale, 0.0, most), "growth_factor": (growth, 1.0, most)}
    for name, (found, low, high) in {**bounds, "backoff_factor": (backoff, 0.0, 1.0)}.items():
        is_number = isinstance(found, numbers.Real) and not isinstance(found, bool)
        if not is_number or not low < float_of(found) < high:
            raise ShardingError(
                f"axes.nn.GradScaler: {name} is a number between {low} and {high}; found {shown(found)}"
            )
    count = whole_number(interval)
    if count is None or not 1 <= count < 2**31:
        raise ShardingError(f"axes.nn.GradScaler: growth_interval is a number of steps; found {shown(interval)}")


def _settled_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of all parameters that an optimizer has, nothing pending, and sparse ones coalesced."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = []
    with torch.no_grad():
        for parameter in distinct(parameters, "axes.nn.GradScaler"):
            gradient = settled_gradient(parameter)
            if gradient is None:
                continue
            if gradient.is_sparse:
                gradient = parameter.grad = gradient.coalesce()
            found.append(gradient)
    return found
