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
    from axes import nn as nn
    from axes.algebra.cost import CostModel as CostModel
    from axes.algebra.errors import AxesError as AxesError
    from axes.algebra.errors import DesyncError as DesyncError
    from axes.algebra.errors import ExpressionError as ExpressionError
    from axes.algebra.errors import MeshError as MeshError
    from axes.algebra.errors import ShardingError as ShardingError
    from axes.algebra.errors import SizeError as SizeError
    from axes.algebra.layout import Layout as Layout
    from axes.algebra.logical import Rules as Rules
    from axes.algebra.logical import use_rules as use_rules
    from axes.algebra.mesh import Axis as Axis
    from axes.algebra.mesh import Mesh as Mesh
    from axes.algebra.mesh import use_mesh as use_mesh
    from axes.algebra.plan import Plan as Plan
    from axes.algebra.plan import plan as plan
    from axes.algebra.sharding import Sharding as Sharding
    from axes.debugging.debug import debug as debug
    from axes.launching.launch import launch as launch
    from axes.nn.annotations import annotate as annotate
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
    from axes.nn.shard_module import shard_module as shard_module
    from axes.nn.verification import verify as verify
    from axes.ops.collectives import all_gather as all_gather
    from axes.ops.collectives import all_to_all as all_to_all
    from axes.ops.collectives import axis_index as axis_index
    from axes.ops.collectives import axis_size as axis_size
    from axes.ops.collectives import pmax as pmax
    from axes.ops.collectives import pmean as pmean
    from axes.ops.collectives import pmin as pmin
    from axes.ops.collectives import ppermute as ppermute
    from axes.ops.collectives import psum as psum
    from axes.ops.collectives import psum_scatter as psum_scatter
    from axes.ops.einops_ops import einsum as einsum
    from axes.ops.einops_ops import rearrange as rearrange
    from axes.ops.einops_ops import reduce as reduce
    from axes.ops.einops_ops import repeat as repeat
    from axes.ops.reshard import constrain as constrain
    from axes.ops.reshard import reshard as reshard
    from axes.ops.shard_map import shard_map as shard_map
    from axes.runtime.factories import empty as empty
    from axes.runtime.factories import full as full
    from axes.runtime.factories import ones as ones
    from axes.runtime.factories import rand as rand
    from axes.runtime.factories import randn as randn
    from axes.runtime.factories import zeros as zeros
    from axes.runtime.groups import GroupOptions as GroupOptions
    from axes.runtime.groups import destroy_process_groups as destroy_process_groups
    from axes.runtime.groups import process_groups as process_groups
    from axes.runtime.sharded import from_local as from_local
    from axes.runtime.sharded import shard as shard
    from axes.runtime.sharded import sharding_of as sharding_of
    from axes.runtime.sharded import spec_of as spec_of
    from axes.runtime.sharded import to_local as to_local
    from axes.runtime.sharded import unshard as unshard
    from axes.runtime.simulate import simulate as simulate
    from axes.runtime.world import init_mesh as init_mesh
    from axes.show.explain import explain as explain
    from axes.show.show import show as show
    from axes.transfers.jobs import connect as connect
    from axes.transfers.layout_rules import LayoutRules as LayoutRules
    from axes.transfers.transfers import transfer as transfer

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
    "axes.nn.annotations": ("annotate",),
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
    "axes.nn.verification": ("verify",),
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
    "axes.show.explain": ("explain",),
    "axes.show.show": ("show",),
    "axes.transfers.jobs": ("connect",),
    "axes.transfers.layout_rules": ("LayoutRules",),
    "axes.transfers.transfers": ("transfer",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_FOLDERS = {"nn": "axes.nn"}
"""Public names that are modules themselves."""

__all__ = sorted([*_MODULE_OF, *_FOLDERS])

_providers.provide(
    runtime="axes.runtime.bridge",
    pictures="axes.show.show",
    transfers="axes.transfers.transfer_runs",
    debugging="axes.debugging.debug",
)

if {"AXES_CHECK", "AXES_TRACE"} & os.environ.keys():  # which count without `axes.init_mesh`, too
    importlib.import_module("axes.debugging.debug")

# `axes.show` is a function, and it lives in a folder of the same name. The first import of a folder binds its name,
# so that it is imported here, where nothing can come later that puts the folder in the place of the function.
importlib.import_module("axes.show")
del globals()["show"]


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
