"""Models: layers whose dims have names, and what trains a sharded model.

up = axes.nn.Einsum("b s embed, mlp embed -> b s mlp", embed=4096, mlp=16384)
optimizer = axes.nn.local_optimizer(torch.optim.AdamW, model.parameters(), lr=3e-4)
norm = axes.nn.clip_grad_norm_(model.parameters(), 1.0)
"""

from __future__ import annotations

from axes.nn.clip_grad_norm import clip_grad_norm_
from axes.nn.dropout import Dropout, dropout, sample
from axes.nn.functions import (
    argmax,
    cross_entropy,
    embedding,
    entropy,
    layer_norm,
    log_softmax,
    logsumexp,
    rms_norm,
    softmax,
    topk,
)
from axes.nn.layers import Einsum, Embedding, LayerNorm, RMSNorm
from axes.nn.local_optimizer import local_optimizer
from axes.nn.safetensors import load_safetensors, save_safetensors
from axes.nn.verify import verify

__all__ = [
    "Dropout",
    "Einsum",
    "Embedding",
    "LayerNorm",
    "RMSNorm",
    "argmax",
    "clip_grad_norm_",
    "cross_entropy",
    "dropout",
    "embedding",
    "entropy",
    "layer_norm",
    "load_safetensors",
    "local_optimizer",
    "log_softmax",
    "logsumexp",
    "rms_norm",
    "sample",
    "save_safetensors",
    "softmax",
    "topk",
    "verify",
]


def __dir__() -> list[str]:
    """The public names alone: submodules that happen to be imported aren't among them."""
    return list(__all__)
