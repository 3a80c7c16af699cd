"""Checkpoints of DTensors that are split by a factor of a dim.

What a rank has of `(three=3 h@tp d) e` are three runs of rows. torch's distributed checkpoint takes a
shard for one box of the whole tensor, and would load the first rows, as many as the shard has, on every
rank. Here such a shard is as many boxes as it has runs, in all three ways that torch asks for them:

    dcp.save(model.state_dict(), checkpoint_id=...)       # each run a chunk, with its place in the whole
    dcp.load(state, checkpoint_id=...)                    # whatever the sharding under which it was saved
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

What is saved is a checkpoint like any other: it loads on any mesh and under any sharding, with axes or
without. All other DTensors go torch's way, FSDP2's strided shards among them, each of which is one box.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError
from axes.algebra.sharding import Sharding
from axes.runtime import torch_private
from axes.runtime.sharded import take_shard
from axes.runtime.torch_placements import sharding_of_spec

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A part of a shard that is contiguous in the whole tensor.

    offsets: where it starts in the whole. start: where it starts in the shard.
    """

    offsets: Shape
    sizes: Shape
    start: Shape

    def within(self, shard: torch.Tensor) -> torch.Tensor:
        """The part of a shard, as a view."""
        return shard[_slices(self.start, self.sizes)]

    def of(self, whole: Any) -> Any:
        """The same part of the whole tensor, or of a file's."""
        return whole[_slices(self.offsets, self.sizes)]


def boxes_of(x: DTensor) -> tuple[Box, ...] | None:
    """The boxes of this rank's shard; None where torch knows them itself, which it does of one box of an even dim.

    Raises `ShardingError` for strided placements that no spec says.
    """
    spec = torch_private.spec_of(x)
    strided = any(isinstance(p, torch_private.StridedShard) for p in spec.placements)
    if not strided or 0 in spec.shape or any(p.is_partial() for p in spec.placements):
        return None
    found = parts_of(x)
    return None if len(found) == 1 and sharding_of_spec(spec).divides(tuple(x.shape)) else found


def parts_of(x: torch.Tensor) -> tuple[Box, ...]:
    """The boxes of what this rank has of a tensor: all of a plain one, nothing outside of a DTensor's mesh."""
    if not isinstance(x, DTensor):
        nothing = (0,) * x.ndim
        return (Box(nothing, tuple(x.shape), nothing),)
    sharding = sharding_of_spec(torch_private.spec_of(x))
    return _boxes(sharding, tuple(x.shape), sharding.mesh.rank)


def _boxes(sharding: Sharding, shape: Shape, rank: int) -> tuple[Box, ...]:
    """The boxes of a rank's shard: one for each choice of a run in each dim.

    >>> from axes.algebra.mesh import Mesh
    >>> sharding = Mesh("tp=2").sharding("(three=3 h@tp) e")
    >>> [(box.offsets, box.start) for box in _boxes(sharding, (12, 5), 1)]
    [((2, 0), (0, 0)), ((6, 0), (2, 0)), ((10, 0), (4, 0))]
    """
    if sharding.mesh.universe.position(rank) is None:
        return ()
    dims = []
    for indices in sharding.local_indices(shape, rank):
        start, runs = 0, []
        for run in (indices,) if isinstance(indices, slice) else indices:
            runs.append((run.start, run.stop - run.start, start))
            start += run.stop - run.start
        dims.append([run for run in runs if run[1]])
    return tuple(Box(*(tuple(run[part] for run in chosen) for part in range(3))) for chosen in product(*dims))


def _slices(starts: Shape, sizes: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


# --- what torch calls


def install() -> None:
    """Has torch ask here about DTensors that are split by a factor."""
    for name, ours in _PROTOCOL.items():
        torch_private.stand_in(DTensor, name, functools.partial(_asked, ours))
    torch_private.replace_distribution_of_state_dicts(_distribute)


def _asked(ours: Callable[..., Any], own: Callable[..., Any], x: DTensor, *args: Any) -> Any:
    boxes = boxes_of(x)
    return own(x, *args) if boxes is None else ours(x, boxes, *args)


def _write_items(x: DTensor, boxes: Sequence[Box], fqn: str, _: Any) -> list[Any]:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if (storage := sys.modules.get("torch.distributed.checkpoint.hf_storage")) is not None:
        _refuse_files_with_one_part_of_a_tensor(storage.HuggingFaceStorageWriter)
    properties = TensorProperties.create_from_tensor(torch_private.local_of(x))
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=x.size()),
        )
        for chunk in _chunks(x, boxes)
    ]


def _chunks(_: DTensor, boxes: Sequence[Box]) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in boxes]


def _part(x: DTensor, boxes: Sequence[Box], index: Any) -> torch.Tensor:
    (box,) = [box for box in boxes if box.offsets == index.offset]  # one of its chunks
    return box.within(x.to_local())


_PROTOCOL: dict[str, Callable[..., Any]] = {
    "__create_write_items__": _write_items,
    "__create_chunk_list__": _chunks,
    "__get_tensor_shard__": _part,
}
"""DTensor's protocol for checkpoints (2.11 to 2.13), and what answers it for a shard of these boxes."""


def _distribute(own: Callable[..., None], state: dict[str, Any], keys: Sequence[str], *how: Any) -> None:
    """Cut the whole tensors of a broadcast state dict into shards."""
    for key in keys:
        x, whole = found if isinstance(found := state.get(key), tuple) else (None, None)
        if isinstance(x, DTensor) and (x.device_mesh.get_coordinate() is None or boxes_of(x) is not None):
            spec = torch_private.spec_of(x)
            state[key] = torch_private.dtensor(take_shard(whole.detach(), sharding_of_spec(spec)), spec)
    own(state, keys, *how)  # which leaves tensors as they are


@functools.lru_cache(maxsize=1)
def _refuse_files_with_one_part_of_a_tensor(writer: Any) -> None:
    """Has the writer of safetensors files refuse several parts of one tensor from one rank.

    It names what is in a file by the tensor alone, and would keep the last part. Done when such parts are
    first saved, since whoever saves has imported it.
    """
    torch_private.stand_in(writer, "prepare_local_plan", _of_single_parts)


def _of_single_parts(own: Callable[..., Any], writer: Any, plan: Any) -> Any:
    if several := [name for name, count in Counter(item.index.fqn for item in plan.items).items() if count > 1]:
        raise ShardingError(
            f"'{several[0]}' is split by a factor of a dim, so that a rank has several parts of it, and "
            "a safetensors file has room for one. Save it whole, from "
            "get_model_state_dict(options=StateDictOptions(full_state_dict=True)), or with "
            "torch.distributed.checkpoint's own FileSystemWriter"
        )
    return own(writer, plan)
