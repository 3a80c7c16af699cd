"""The tensors of a module: by name, each once, and filled from whole ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from axes.extension import boxes, local, written


def tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, by whole name, each name of a tensor that has several."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def by_tensor(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[list[str], torch.Tensor]]:
    """Each tensor once, with all of its names: several where it is tied."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def fill(x: torch.Tensor, whole: Any) -> None:
    """Copy this rank's part of a whole tensor, or of a file's, to where it is; autograd is told."""
    shard = local(x)
    with torch.no_grad():
        for box in boxes(x):
            if 0 not in box.sizes:
                box.within(shard).copy_(box.of(whole))
    written([x])
