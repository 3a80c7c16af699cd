"""The types of what operations take and give."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

T = TypeVar("T", DTensor, torch.Tensor)
"""A kind of tensor: of DTensors an operation makes DTensors, of plain tensors plain ones."""
