"""A law of files: what any sharding saves any other loads, bit for bit, and without the library too."""

from __future__ import annotations

import torch
from torch import nn

import axes
from tests.whole_cases import DTYPES, Draw, Grid


def files(d: Draw) -> None:
    """Tensors that are saved on one mesh are loaded on another, on a third, from files of others, and whole."""
    p, random = d.program, d.random
    p.do("from tests.law_files import alone, module, zeros; from tests.law_training import shared_folder")
    p.do("import torch.distributed.checkpoint as dcp; from safetensors.torch import save_file")
    p.do(
        "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict"
    )
    grid, g = d.grid(elsewhere=0.3, sub=False)
    shapes = [d.shape(extents=(1, 2, 3, 4, 6, 8, 12, 24)) for _ in range(4)]
    dtypes = [random.choice(DTYPES[:-1]) for _ in shapes]  # safetensors has no complex128
    for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        d.features.add(str(dtype).removeprefix("torch."))
        p.do(f"W{at} = whole({shape}, {d.seed()}, {dtype})")
    wholes = ", ".join(f"'{at}.w': W{at}" for at in range(len(shapes)))
    p.do(f"wholes = {{{wholes}}}")
    p.do(f"saved = {sharded(d, grid, g, shapes)}")
    p.do("folder = shared_folder(); path = folder.__enter__()")
    p.do(
        "dcp.save({k: axes.shard(wholes[k], s, mesh=g.mesh) for k, (g, s) in saved.items()}, checkpoint_id=f'{path}/dcp')"
    )
    p.do("if dist.get_rank() == 0: save_file(wholes, f'{path}/model.safetensors')")
    p.do("dist.barrier()")
    p.do("assert alone(f'{path}/dcp', wholes)")
    for _ in range(2):
        to, t = d.grid(elsewhere=0.3, sub=False)
        p.do(f"wanted = {sharded(d, to, t, shapes)}")
        way = random.choice(("dcp", "dcp", "safetensors", "broadcast", "whole"))
        d.features.add(f"from {way}")
        p.do("x = zeros(wholes, wanted)")
        if way == "dcp":
            p.do("dcp.load(x, checkpoint_id=f'{path}/dcp')")
        elif way == "safetensors":
            p.do("axes.nn.load_safetensors(module(x), path)")
        else:
            has = "wholes" if way == "whole" else "wholes if dist.get_rank() == 0 else {}"
            p.do(f"options = StateDictOptions(full_state_dict=True, broadcast_from_rank0={way == 'broadcast'})")
            p.do(f"set_model_state_dict(module(x), dict({has}), options=options)")
            p.do("back = get_model_state_dict(module(x), options=StateDictOptions(full_state_dict=True))")
            p.do(f"for k in back if {t}.here is not None else (): same(back[k], wholes[k], k)")
        p.do("for k, (g, s) in wanted.items(): check(x[k], wholes[k], g, s)")
    p.do("folder.__exit__(None, None, None)")


def sharded(d: Draw, grid: Grid, g: str, shapes: list[tuple[int, ...]]) -> str:
    """Text of a sharding for each tensor."""
    found = []
    for at, shape in enumerate(shapes):
        spec = d.accepted(grid, shape)
        d.note(grid, spec, shape)
        found.append(f"'{at}.w': ({g}, {spec!r})")
    return "{" + ", ".join(found) + "}"


def zeros(wholes: dict[str, torch.Tensor], wanted: dict[str, tuple[Grid, str]]) -> dict[str, torch.Tensor]:
    """Tensors without their values."""
    return {k: axes.shard(torch.zeros_like(wholes[k]), s, mesh=g.mesh) for k, (g, s) in wanted.items()}


def module(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module that has these tensors, as parameters or as buffers."""
    found = nn.ModuleDict()
    for name, x in tensors.items():
        found[name.partition(".")[0]] = inner = nn.Module()
        if x.is_floating_point():
            inner.w = nn.Parameter(x)
        else:
            inner.register_buffer("w", x)
    return found


def alone(path: str, wholes: dict[str, torch.Tensor]) -> bool:
    """Whether one process, without a mesh, finds the whole tensors."""
    import warnings

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if dist.get_rank():
        return True
    found = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in one process
        dcp.load(found, checkpoint_id=path, no_dist=True)
    return all(torch.equal(found[name], wholes[name]) for name in wholes)
