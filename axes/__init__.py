"""axes: named-axis sharding for PyTorch, in einops notation.

Ranks are numbers, axes are their digits. A mesh, a sharding, a process group and a collective are
all regroupings of digits, so one einops-style expression can write any of them.

>>> import axes
>>> mesh = axes.Mesh("dp cp=2 tp=2", "fsdp = dp cp", ranks=range(8))
>>> mesh.shape, mesh.names["fsdp"]
({'dp': 2, 'cp': 2, 'tp': 2}, 4)
>>> mesh.sharding("batch@dp seq@(cp tp) embed").local_shape((8, 32, 16))
(4, 8, 16)

This file is the whole public surface. A name is imported when it is first used, so that the
algebra (`axes.Mesh`) needs no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from axes.algebra import providers as _providers

if TYPE_CHECKING:
    from axes import convert, nn
    from axes.algebra.cost import CostModel
    from axes.algebra.errors import AxesError, DesyncError, ExpressionError, MeshError, ShardingError, SizeError
    from axes.algebra.layout import Layout
    from axes.algebra.logical import Rules, use_rules
    from axes.algebra.mesh import Axis, Mesh, use_mesh
    from axes.algebra.plan import Plan, plan
    from axes.algebra.sharding import Sharding
    from axes.debugging.debug import debug
    from axes.launching.launch import launch
    from axes.nn.annotate import annotate
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
    from axes.nn.shard_module import shard_module
    from axes.nn.verify import verify
    from axes.ops.collectives import (
        all_gather,
        all_to_all,
        axis_index,
        axis_size,
        pmax,
        pmean,
        pmin,
        ppermute,
        psum,
        psum_scatter,
    )
    from axes.ops.einops_ops import einsum, rearrange, reduce, repeat
    from axes.ops.reshard import constrain, reshard
    from axes.ops.shard_map import shard_map
    from axes.pictures.explain import explain
    from axes.pictures.show import show
    from axes.runtime.factories import empty, full, ones, rand, randn, zeros
    from axes.runtime.groups import GroupOptions, destroy_process_groups, process_groups
    from axes.runtime.sharded import from_local, shard, sharding_of, spec_of, to_local, unshard
    from axes.runtime.simulate import simulate
    from axes.runtime.world import init_mesh
    from axes.transfers.jobs import connect
    from axes.transfers.layout_rules import LayoutRules
    from axes.transfers.transfers import Transfer, transfer

__all__ = [
    "AxesError",
    "Axis",
    "CostModel",
    "DesyncError",
    "ExpressionError",
    "GroupOptions",
    "Layout",
    "LayoutRules",
    "Mesh",
    "MeshError",
    "Plan",
    "Rules",
    "Sharding",
    "ShardingError",
    "SizeError",
    "Transfer",
    "all_gather",
    "all_to_all",
    "annotate",
    "argmax",
    "axis_index",
    "axis_size",
    "connect",
    "constrain",
    "convert",
    "cross_entropy",
    "debug",
    "destroy_process_groups",
    "einsum",
    "embedding",
    "empty",
    "entropy",
    "explain",
    "from_local",
    "full",
    "init_mesh",
    "launch",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "nn",
    "ones",
    "plan",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "process_groups",
    "psum",
    "psum_scatter",
    "rand",
    "randn",
    "rearrange",
    "reduce",
    "repeat",
    "reshard",
    "rms_norm",
    "shard",
    "shard_map",
    "shard_module",
    "sharding_of",
    "show",
    "simulate",
    "softmax",
    "spec_of",
    "to_local",
    "topk",
    "transfer",
    "unshard",
    "use_mesh",
    "use_rules",
    "verify",
    "zeros",
]

_HOME = {
    "axes.algebra.cost": ("CostModel",),
    "axes.algebra.errors": ("AxesError", "DesyncError", "ExpressionError", "MeshError", "ShardingError", "SizeError"),
    "axes.algebra.layout": ("Layout",),
    "axes.algebra.logical": ("Rules", "use_rules"),
    "axes.algebra.mesh": ("Axis", "Mesh", "use_mesh"),
    "axes.algebra.plan": ("Plan", "plan"),
    "axes.algebra.sharding": ("Sharding",),
    "axes.debugging.debug": ("debug",),
    "axes.launching.launch": ("launch",),
    "axes.nn.annotate": ("annotate",),
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
    "axes.nn.shard_module": ("shard_module",),
    "axes.nn.verify": ("verify",),
    "axes.ops.collectives": (
        "all_gather",
        "all_to_all",
        "axis_index",
        "axis_size",
        "pmax",
        "pmean",
        "pmin",
        "ppermute",
        "psum",
        "psum_scatter",
    ),
    "axes.ops.einops_ops": ("einsum", "rearrange", "reduce", "repeat"),
    "axes.ops.reshard": ("constrain", "reshard"),
    "axes.ops.shard_map": ("shard_map",),
    "axes.runtime.factories": ("empty", "full", "ones", "rand", "randn", "zeros"),
    "axes.runtime.groups": ("GroupOptions", "destroy_process_groups", "process_groups"),
    "axes.runtime.sharded": ("from_local", "shard", "sharding_of", "spec_of", "to_local", "unshard"),
    "axes.runtime.simulate": ("simulate",),
    "axes.runtime.world": ("init_mesh",),
    "axes.pictures.explain": ("explain",),
    "axes.pictures.show": ("show",),
    "axes.transfers.jobs": ("connect",),
    "axes.transfers.layout_rules": ("LayoutRules",),
    "axes.transfers.transfers": ("Transfer", "transfer"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_FOLDERS = {"convert": "axes.convert", "nn": "axes.nn"}
"""Public names that are modules themselves."""

_providers.provide(
    runtime="axes.runtime.bridge",
    pictures="axes.pictures.show",
    transfers="axes.transfers.execution",
    debugging="axes.debugging.debug",
)

if not TYPE_CHECKING:  # type checkers know the names above, and a name that isn't there is an error to them

    def __getattr__(name: str) -> Any:
        if name in _FOLDERS:
            return importlib.import_module(_FOLDERS[name])
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'axes' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names alone: submodules that happen to be imported aren't among them."""
    return list(__all__)


if {"AXES_CHECK", "AXES_TRACE"} & os.environ.keys():  # which count without `axes.init_mesh`, too
    importlib.import_module("axes.debugging.debug")
