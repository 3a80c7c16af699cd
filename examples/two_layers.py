"""The first program: two layers of a network on four ranks, beside the same on one device.

The batch is split over `dp`, and the hidden dim over `tp`, so the second product needs one sum over `tp`.

    python examples/two_layers.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from support import Compared, compared, report
from torch import Tensor

import axes

SPECS = {"x": "batch@dp embed", "up": "hidden@tp embed", "down": "embed hidden@tp"}


def two_layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The network on DTensors. A dim without an `@`, here `batch`, keeps the sharding that it has."""
    h = axes.einsum(x, up, "batch embed, hidden@tp embed -> batch hidden@tp")  # sends nothing
    return axes.einsum(F.gelu(h), down, "batch hidden@tp, embed hidden@tp -> batch embed")  # an all-reduce


def on_one_device(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up.T) @ down.T


def compare() -> Compared:
    """Each rank: the result, the gradients, and the collectives of both passes."""
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    torch.manual_seed(0)
    wholes = {"x": torch.randn(8, 16), "up": torch.randn(32, 16) / 4, "down": torch.randn(16, 32) / 6}
    inputs = {name: (whole, SPECS[name], mesh) for name, whole in wholes.items()}
    return compared(two_layers, on_one_device, inputs, torch.randn(8, 16))


if __name__ == "__main__":
    sys.exit(report("two_layers.py", axes.launch(compare, 4)))
