"""`python -m axes demo`: four local processes multiply matrices that none has the whole of.

What it shows is what happened: what was sent, by the trace of the processes, and the result beside that of one device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from axes.algebra.plan import bytes_text
from axes.ops.einops_ops import einsum, rearrange
from axes.runtime.check import debug
from axes.runtime.launch import launch
from axes.runtime.sharded import shard, to_local, unshard
from axes.runtime.world import init_mesh
from axes.show import timeline

MESH = "dp=2 tp=2"
BATCH, EMBED, HIDDEN = 64, 256, 1024

UP = "b e, e h@tp -> b h@tp"
DOWN = "b h@tp, h@tp e -> b e@tp"
BACK = "b e@tp -> b e"


def block(x: Any, up: Any, down: Any) -> Any:
    """Two products over a hidden dim that is split over tp."""
    hidden = einsum(x, up, UP).relu()
    return rearrange(einsum(hidden, down, DOWN), BACK)


def of_rank(folder: str) -> tuple[tuple[int, ...], float]:
    """The shape of what this rank has of the result, and how far that is from one device's."""
    mesh = init_mesh(MESH, device_type="cpu")
    torch.manual_seed(0)
    x, up, down = torch.randn(BATCH, EMBED), torch.randn(EMBED, HIDDEN) / 16, torch.randn(HIDDEN, EMBED) / 32
    given = (
        shard(x, "b@dp e", mesh=mesh),
        shard(up, "e h@tp", mesh=mesh),
        shard(down, "h@tp e", mesh=mesh),
    )
    mesh.create_groups("dp", "tp")
    with debug(trace=str(Path(folder, "trace.jsonl"))):
        y = block(*given)
    expected = (x @ up).relu() @ down
    return tuple(to_local(y, grad="summed").shape), float((unshard(y) - expected).abs().max())


def run_demo() -> dict[str, Any]:
    """Runs the four processes; what they did."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = launch(of_rank, 4, folder, timeout=120)
        job = timeline.read_traces(sorted(Path(folder).iterdir()))
    first = job.logs[0]
    return {
        "mesh": MESH,
        "local_shapes": [[*shape] for shape, _ in ranks],
        "largest_difference": max(difference for _, difference in ranks),
        "collectives": [
            {"expression": event.parts[-1], "axis": event.op["axis"], "bytes_out": event.bytes_out, "is": event.what}
            for event in first.events
        ],
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What they did, as text of 80 columns."""
    yield f"mesh {found['mesh']}: four processes of this machine, joined by gloo"
    yield ""
    yield f"  x     [{BATCH}, {EMBED}]    batch over dp"
    yield f"  up    [{EMBED}, {HIDDEN}]  columns over tp"
    yield f"  down  [{HIDDEN}, {EMBED}]  rows over tp"
    yield ""
    yield f'  h = axes.einsum(x, up, "{UP}").relu()'
    yield f'  y = axes.einsum(h, down, "{DOWN}")'
    yield f'  z = axes.rearrange(y, "{BACK}")'
    yield ""
    yield "What rank 0 sent, from its trace (AXES_TRACE=trace.jsonl):"
    for event in found["collectives"]:
        yield f"  {bytes_text(event['bytes_out'])} over {event['axis']}, for {event['expression']}"
        yield from timeline.wrapped(event["is"], "    ")
    yield ""
    shape = found["local_shapes"][0]
    yield f"Each rank has {shape} of z, whose batch is split over dp. No element differs"
    yield f"by more than {found['largest_difference']:.1e} from what one device computes."
