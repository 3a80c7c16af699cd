"""The names that packages around axes are built from, beside the public ones of `axes`.

`axes.nn` is such a package, and `tests/test_extension.py` has one of somebody else's. These names stay as they are:

| name | for |
| --- | --- |
| `read` | an expression as a tree of specs, dims and places |
| `whole` | which part of which whole tensor a shard is |
| `local`, `dtensor` | this rank's shard of a DTensor, and back |
| `boxes` | the blocks of the whole tensor that a shard consists of |
| `linear` | a map of tensors with a gradient of its own, which arrives in whatever sharding |
| `written` | autograd is told that tensors were written |
| `draw` | random values that don't depend on the mesh |
| `agree` | ranks compare what they hold, before they rely on it |
| `collective`, `Operation` | communication of one's own, which is checked and traced as that of axes |
| `listen` | to hear of all communication |
| `within` | an expression around operations, which is compared and traced with them |
| `dense` | tensors that code on shards can't take are refused |
| `shown` | values and near names, as errors say them |

The other names that can be imported from here are for the packages of axes itself, and change with it. Each is imported
below or in `builders` from the module that defines and documents it. `builders` needs torch, and is imported when one
of its names is first asked for; the names below are of the algebra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from axes.algebra.chunks import (
    Box,
    Runs,
    Tile,
    count,
    factor_runs,
    intersection,
    largest_chunk,
    local_runs,
    merged,
    nested_chunk,
    smallest_chunk,
    tile_shape,
    volume,
)
from axes.algebra.cost import members_of_node
from axes.algebra.errors import shortened, shown, suggestion, unknown_axis
from axes.algebra.expressions import Recipe, gradient, recipe, unmoved
from axes.algebra.expressions.reading import read as read_operation
from axes.algebra.expressions.rules import REDUCTIONS
from axes.algebra.expressions.transpose import on_own_axes, transposed
from axes.algebra.grammar import (
    Dim,
    Factor,
    Item,
    Span,
    Spec,
    TensorExpression,
    check_different,
    items_of,
    parse_declaration,
    parse_equation,
    parse_mesh,
)
from axes.algebra.grammar import parse_tensor as read
from axes.algebra.layout import Universe
from axes.algebra.mesh import ambient_mesh, checked_mesh, required_mesh
from axes.algebra.mesh_names import check_sides
from axes.algebra.opaque import Dtype
from axes.algebra.placements import check_torch_can
from axes.algebra.plan import Step, bytes_text, dtype_name, itemsize_of, model_of
from axes.algebra.planning.candidates import COLLECTIVES
from axes.algebra.planning.exchange import (
    Exchange,
    GroupExchange,
    GroupSide,
    Pieces,
    group_between,
    pieces_of,
    ranks_of_both,
)
from axes.algebra.providers import Pictured
from axes.algebra.sharding import layouts_text, pending_runs, slots_text, unmarked, whole_shape
from axes.algebra.sizes import checked_rank, checked_tensor_shape, given_sizes, tuple_of, whole_number, written_sizes
from axes.algebra.specs import check_same_dims, factors_by_name, marked_sharding, parsed_sharding

if TYPE_CHECKING:
    from axes.extension.builders import (
        LINGER_SECONDS,
        Barrier,
        Grid,
        Member,
        MissedError,
        Operation,
        World,
        abort_group_of,
        agree,
        agree_at,
        arranged,
        as_timeout,
        at_user_place,
        bound_to_job,
        boxes,
        collective,
        communicator,
        context,
        current_world,
        dense,
        draw,
        dtensor,
        elements_of,
        group_of,
        heard,
        in_time,
        is_dense,
        is_users,
        line_of_code,
        linear,
        listen,
        local,
        note_key,
        of_world,
        part_said,
        passed_files,
        polled,
        ranks_text,
        say_why,
        shared_cotangent,
        torch_private,
        user_frame,
        watching,
        whole,
        whole_text,
        within,
        written,
    )

__all__ = [
    "Operation",
    "agree",
    "boxes",
    "collective",
    "dense",
    "draw",
    "dtensor",
    "linear",
    "listen",
    "local",
    "read",
    "shown",
    "whole",
    "within",
    "written",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return getattr(importlib.import_module("axes.extension.builders"), name)
