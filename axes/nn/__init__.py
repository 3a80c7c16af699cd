"""Models: layers whose dims have names, and what trains a sharded model.

    up = axes.nn.Einsum("b s embed, mlp embed -> b s mlp", embed=4096, mlp=16384)
    optimizer = axes.nn.local_optimizer(torch.optim.AdamW, model.parameters(), lr=3e-4)
    norm = axes.nn.clip_grad_norm_(model.parameters(), 1.0)

A name is imported when it is first used, as those of `axes` are.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axes.nn.clip_grad_norm import clip_grad_norm_ as clip_grad_norm_
    from axes.nn.clip_grad_norm import total_norm as total_norm
    from axes.nn.dropping import Dropout as Dropout
    from axes.nn.dropping import dropout as dropout
    from axes.nn.dropping import sample as sample
    from axes.nn.functions import argmax as argmax
    from axes.nn.functions import cross_entropy as cross_entropy
    from axes.nn.functions import embedding as embedding
    from axes.nn.functions import entropy as entropy
    from axes.nn.functions import layer_norm as layer_norm
    from axes.nn.functions import log_softmax as log_softmax
    from axes.nn.functions import logsumexp as logsumexp
    from axes.nn.functions import rms_norm as rms_norm
    from axes.nn.functions import softmax as softmax
    from axes.nn.functions import topk as topk
    from axes.nn.layers import Einsum as Einsum
    from axes.nn.layers import Embedding as Embedding
    from axes.nn.layers import LayerNorm as LayerNorm
    from axes.nn.layers import RMSNorm as RMSNorm
    from axes.nn.optimizers import local_optimizer as local_optimizer
    from axes.nn.verification import verify as verify
    from axes.nn.weight_files import load_safetensors as load_safetensors
    from axes.nn.weight_files import save_safetensors as save_safetensors

_HOME = {
    "axes.nn.clip_grad_norm": ("clip_grad_norm_", "total_norm"),
    "axes.nn.dropping": ("Dropout", "dropout", "sample"),
    "axes.nn.functions": (
        "argmax",
        "cross_entropy",
        "embedding",
        "entropy",
        "layer_norm",
        "log_softmax",
        "logsumexp",
        "rms_norm",
        "softmax",
        "topk",
    ),
    "axes.nn.layers": ("Einsum", "Embedding", "LayerNorm", "RMSNorm"),
    "axes.nn.optimizers": ("local_optimizer",),
    "axes.nn.verification": ("verify",),
    "axes.nn.weight_files": ("load_safetensors", "save_safetensors"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


if not TYPE_CHECKING:  # type checkers know the names above, and a name that isn't there is an error to them

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'axes.nn' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names alone: submodules that happen to be imported aren't among them."""
    return list(__all__)
