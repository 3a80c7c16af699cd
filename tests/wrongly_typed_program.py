"""Mistakes that a type checker finds: each line below is an error in mypy and in pyright."""

from __future__ import annotations

import torch

import axes


def mistakes(mesh: axes.Mesh, x: torch.Tensor) -> None:
    axes.reshrad(x, "b d@tp")
    axes.unshard(x)
    axes.reshard("b d", "b d@tp")
    axes.rearrange(x, "b d -> d b", mesh="tp")
    axes.einsum("b d -> d b", x)
    axes.from_local(x, "b d", grad="sumed")
    mesh.device_mesh.no_such_method()
    mesh.axis("tp").group.no_such_method()
    print(mesh.axis("tp").no_such_property)
    axes.launch(mistakes, "8")
