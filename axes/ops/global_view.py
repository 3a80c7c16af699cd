"""Recipes on DTensors: one autograd function per call, whose gradient is one more recipe.

    y = apply_global("einsum", "b s d, d f@tp -> b s f@tp", "sum", (x, w))

The shards are taken out, a `BoundRecipe` runs on them outside of autograd, and a DTensor is put around
the result. Backward takes the cotangent in whatever sharding it comes: the gradient's recipe is
derived from the forward's (`axes.algebra.flow.gradient`), applied the same way, and can be
differentiated again. What a gradient has pending stays so until something needs it: a leaf resolves
its own once, when everything that goes into it has been added up.

Each call costs one look-up by text and specs. A spec (torch's `DTensorSpec`) is one object per kind
of result, so that the next call finds it by identity.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.ambient import ambient_mesh
from axes.algebra.errors import MeshError, ShardingError, shown
from axes.algebra.flow import Recipe, gradient, recipe, unmoved
from axes.algebra.flow.recipe import Op, Shape, op_name
from axes.algebra.grammar import checked_text
from axes.algebra.mesh import Mesh
from axes.algebra.scopes import checked_mesh
from axes.algebra.sharding import PendingReduction, Sharding
from axes.algebra.sizes import checked_flag
from axes.ops import autocast
from axes.ops.extents import Extents, extents_of, traced_extents
from axes.ops.recipes import BoundRecipe, bind
from axes.runtime import flags, torch_private
from axes.runtime.border import Changes, counted_whole, enter_global, leave_global
from axes.runtime.graphs import device_mesh_input, known, node_of_graph, number_of
from axes.runtime.groups import of_world
from axes.runtime.leaves import leave_pending, resolve_at_leaf, settles
from axes.runtime.linear import Kept, around, linear
from axes.runtime.packing import strides_of
from axes.runtime.places import within
from axes.runtime.redistribute import Dtypes, both
from axes.runtime.routes import resharded, settled
from axes.runtime.symbols import hints, is_symbolic, spec_at
from axes.runtime.torch_placements import sharding_of_spec, torch_placements
from axes.runtime.transforms import PLAIN, check_transforms

Sizes = tuple[tuple[str, Any], ...]
Spec = Any
"""torch's `DTensorSpec`: mesh, placements, shape, strides and dtype in one hashable value."""

Grad = Literal["resolved", "pending"]
"""What becomes of a leaf's gradient: brought to the leaf's own sharding, or left as it comes."""

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_LINEAR_OPS = ("sum", "mean")


@dataclass(frozen=True, eq=False)
class Global:
    """A program for DTensors: what it does to their shards, and what is put around the result."""

    program: BoundRecipe
    device_mesh: Any
    placements: tuple[Any, ...]
    caches: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict, repr=False)

    @property
    def recipe(self) -> Recipe:
        """What the program was made from."""
        return self.program.extents.recipe

    def calling(self, function: Callable[..., Any]) -> Global:
        """The same, with the caller's function for the reduction, for one call."""
        return Global(self.program.calling(function), self.device_mesh, self.placements)

    def run(self, operands: Sequence[DTensor], owned: bool = True) -> DTensor:
        """The program on DTensors, outside of autograd.

        If `owned`, the result shares no memory with an operand: autograd wouldn't see a change of it.
        """
        locals_ = tuple(map(torch_private.local_of, operands))
        local = self.program.run(*locals_)
        if owned and self.program.may_be_view and _are_one(local, locals_[0]):
            local = local.clone()
        return torch_private.dtensor(local, _spec_around(self, local))


def _are_one(local: torch.Tensor, operand: torch.Tensor) -> bool:
    """Whether two tensors share memory; of what is traced that isn't known."""
    return type(local) not in PLAIN or torch_private.share_memory(local, operand)


Made = TypeVar("Made")


def _per_program(make: Callable[..., Made]) -> Callable[..., Made]:
    """Made once for each program and key, and kept by the program; in a graph with symbolic sizes, made anew."""

    @functools.wraps(make)
    def made(program: Global, *key: Any) -> Made:
        if program.program.extents.is_symbolic:
            return make(program, *key)
        kept = program.caches.get(make)
        if kept is None:
            kept = program.caches[make] = functools.lru_cache(maxsize=256)(functools.partial(make, program))
        return kept(*key)

    return made


def _spec_around(made: Global, local: torch.Tensor) -> Spec:
    """What the result of a program knows of itself, of which this is the shard."""
    if local.is_contiguous():
        return _spec(made, local.dtype, None)
    strides = local.stride()
    return (_spec_at if is_symbolic(strides) else _spec)(made, local.dtype, strides)


def _spec_at(made: Global, dtype: torch.dtype, strides: tuple[int, ...] | None) -> Spec:
    """The same, of its dtype and of the strides of a shard that isn't contiguous."""
    shape = made.program.extents.merged(made.recipe.result.groups)
    whole = strides_of(shape) if strides is None else _whole_strides(shape, strides)
    return torch_private.dtensor_spec(made.device_mesh, made.placements, shape, whole, dtype)


_spec = _per_program(_spec_at)
"""`_spec_at`, kept; symbols can't be. A backward pass may know all sizes of a graph, and a stride as a symbol."""


def _whole_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of the whole with the dims in the order of memory that they have locally."""
    found = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        if strides[dim] or shape[dim] == 1:
            found[dim] = step
            step *= max(1, shape[dim])
    return tuple(found)


def check_grad_of_leaves(grad: object) -> None:
    """`ShardingError` for a `grad` that is none of the two."""
    if not isinstance(grad, str) or grad not in ("resolved", "pending"):
        raise ShardingError(f"grad is 'resolved' or 'pending'; found {shown(grad)}")


def check_options(text: object, mesh: Mesh | None, comm_dtype: Dtypes, async_op: bool, grad: object) -> None:
    """Refuse what the text and the options of an operation can't be, before they are looked up anywhere."""
    if type(text) is not str:
        checked_text(text, ". The tensor comes first, and the expression behind it")
    if type(grad) is not str or grad != "resolved":
        check_grad_of_leaves(grad)
    if mesh is not None and type(mesh) is not Mesh:
        checked_mesh(mesh)
    if comm_dtype is not None:
        both(comm_dtype)
    if async_op is not False:
        checked_flag("async_op", async_op)


def apply_global(
    kind: str,
    text: str,
    op: Op,
    operands: Sequence[DTensor],
    mesh: Mesh | None = None,
    sizes: Sizes = (),
    comm_dtype: Dtypes = None,
    async_op: bool = False,
    grad: Grad = "resolved",
) -> DTensor:
    """The operation on DTensors."""
    if torch_private.transforms_are_on():
        check_transforms(f"axes.{kind}, '{text}',", operands)
    ambient = ambient_mesh() if mesh is None else mesh
    if torch.compiler.is_compiling():
        leaves = tuple([grad == "resolved" and settles(x) for x in operands])
        if grad == "pending":
            for x in operands:
                if x.is_leaf and x.requires_grad:
                    leave_pending(x)
        number = number_of(kind, text, op, ambient, mesh is not None, tuple([name for name, _ in sizes]), comm_dtype)
        home = device_mesh_input(ambient, *operands)
        return _node(number, home, leaves, tuple([size for _, size in sizes]), *operands)
    specs = tuple(map(torch_private.spec_of, operands))
    name = op if type(op) is str else op_name(op)
    made = _made(kind, text, name, specs, ambient, mesh is not None, sizes, comm_dtype, async_op)
    made = made if isinstance(op, str) else made.calling(op)
    if flags.watched:
        return within(f"axes.{kind}", text, _applied, made, operands, grad)
    return _applied(made, operands, grad)


@node_of_graph
def _node(number: int, _: Any, leaves: tuple[bool, ...], given: tuple[int, ...], *operands: DTensor) -> DTensor:
    """The operation as one node of a graph; there, every collective is waited for where it is used.

    A mesh on which no operand is goes in beside them (see `device_mesh_input`).
    Inside a graph nothing is a leaf, and no hook is reached: what is one outside is settled here.
    """
    kind, text, op, mesh, is_given, names, comm_dtype = known(number)
    specs, sizes = tuple([torch_private.spec_of(x) for x in operands]), tuple(zip(names, given, strict=True))
    if not any(is_symbolic(spec.shape) for spec in specs) and not is_symbolic(given):
        made = _made(kind, text, op_name(op), specs, mesh, is_given, sizes, comm_dtype, False)
    else:
        find = functools.partial(_recipe, kind, text, op_name(op), specs, mesh, is_given)
        extents = traced_extents(find, [tuple(spec.shape) for spec in specs], sizes)
        made = _global(extents, specs[0].mesh, comm_dtype)
    made = made if isinstance(op, str) else made.calling(op)
    settling = [settled(x) if leaf else x for x, leaf in zip(operands, leaves, strict=True)]
    return _applied(made, settling, "pending")


def _applied(made: Global, operands: Sequence[DTensor], grad: Grad) -> DTensor:
    has_gradient = torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, operands))
    if has_gradient:
        for x in operands:
            if x.is_leaf and x.requires_grad:
                (resolve_at_leaf if grad == "resolved" else leave_pending)(x)
    run = functools.partial(_function(made) if has_gradient else _run, made)
    return autocast.applied(made.recipe, run, operands, _cast) if torch_private.autocast_may_be_on() else run(*operands)


def _run(made: Global, *operands: DTensor) -> DTensor:
    return made.run(operands)


@of_world(8192)
def _made(
    kind: str,
    text: str,
    op: str,
    specs: tuple[Spec, ...],
    mesh: Mesh | None,
    given: bool,
    sizes: Sizes,
    comm_dtype: Dtypes,
    async_op: bool,
) -> Global:
    """The program for operands with these specs. `mesh` is passed where it is `given`, else ambient."""
    if given and mesh is not None:
        checked_mesh(mesh)
    shapes = tuple(tuple(spec.shape) for spec in specs)
    found = _recipe(kind, text, op, specs, mesh, given, shapes, sizes)
    return _global(extents_of(found), specs[0].mesh, comm_dtype, async_op)


def _recipe(
    kind: str,
    text: str,
    op: str,
    specs: tuple[Spec, ...],
    mesh: Mesh | None,
    given: bool,
    shapes: tuple[Shape, ...],
    sizes: Sizes,
) -> Recipe:
    """The recipe for operands of these shapes, with the placements of `specs`."""
    own = Mesh.from_device_mesh(specs[0].mesh)
    where = mesh if mesh is not None and (given or mesh.universe == own.universe) else own
    return recipe(kind, text, op, tuple(sharding_of_spec(spec) for spec in specs), shapes, where, sizes)


def _global(extents: Extents, device_mesh: Any, comm_dtype: Dtypes, async_op: bool = False) -> Global:
    placements = torch_placements(extents.recipe.result.output)
    return Global(bind(extents, "global", comm_dtype, async_op), device_mesh, placements)


# --- gradients


def _function(made: Global) -> Callable[..., DTensor]:
    op = made.recipe.op
    if made.recipe.kind != "reduce" or op in _LINEAR_OPS:
        return _apply_linear
    return _apply_extreme if op in ("max", "min") else _on_shards


def _apply_linear(made: Global, *operands: DTensor) -> DTensor:
    """What is linear in each operand. The gradient is a recipe of the same kind, and differentiable."""

    def back(cotangent: DTensor, needed: tuple[bool, ...], kept: Kept) -> tuple[DTensor | None, ...]:
        given = made, needed, cotangent, kept[:-1]
        if flags.watched:
            return within(f"gradient of {made.recipe.kind}", made.recipe.text, _gradients, *given)
        return _gradients(*given)

    # An operand is kept for the gradients of the others.
    needed = [x.requires_grad for x in operands]
    keep = [any(needed[:at]) or any(needed[at + 1 :]) for at in range(len(operands))]
    return around(lambda *xs: made.run(xs), back, *operands, keep=(*keep, False))


def _gradients(
    made: Global, needed: tuple[bool, ...], cotangent: DTensor, operands: Sequence[DTensor | None]
) -> tuple[DTensor | None, ...]:
    """The gradients of all operands that need one."""
    cotangent = _on_names(made, cotangent)
    target = _wanted(made, needed, _arriving(cotangent))
    if target is not None:
        cotangent = resharded(cotangent, target, both(made.program.comm_dtype)[1])
    found: list[DTensor | None] = []
    for index, wanted in enumerate(needed):
        others = [x for at, x in enumerate(operands) if at != index and x is not None]
        found.append(_pulled(made, index, cotangent, others) if wanted else None)
    return tuple(found)


def _arriving(cotangent: DTensor) -> Spec:
    """By what the gradient for a cotangent is looked up: its spec, with numbers in a graph with symbolic sizes."""
    spec = torch_private.spec_of(cotangent)
    if type(torch_private.local_of(cotangent)) is torch.Tensor:
        return spec
    return spec_at(spec, hints(spec.shape))


def _on_names(made: Global, cotangent: DTensor) -> DTensor:
    """The cotangent, gathered where a split of it doesn't fall on the names of the expression."""
    source = _source_of_cotangent(made, _arriving(cotangent))
    return cotangent if source is None else resharded(cotangent, source, both(made.program.comm_dtype)[1])


@_per_program
def _source_of_cotangent(made: Global, spec: Spec) -> Sharding | None:
    arrived = _arrived(made.recipe, made, spec)
    first = gradient_of(made.recipe, 0, arrived).inputs[0]
    return None if unmoved(arrived, first.source, first.shape) else first.source


@_per_program
def _wanted(made: Global, needed: tuple[bool, ...], spec: Spec) -> Sharding | None:
    """Where the cotangent is brought once for the gradients of several operands, if these agree."""
    if sum(needed) < 2:
        return None
    return shared_cotangent([_gradient(made, index, spec).recipe for index, wanted in enumerate(needed) if wanted])


def shared_cotangent(gradients: Sequence[Recipe]) -> Sharding | None:
    """Where the gradients of several operands all want the cotangent: then it is brought there once for all of them.

    None where they don't agree, or want it where it is.
    """
    inputs = [each.inputs[0] for each in gradients]
    first = inputs[0]
    if any(len(group) != 1 for i in inputs for group in i.groups) or any(i.prepared != first.prepared for i in inputs):
        return None
    return None if unmoved(first.source, first.prepared, first.shape) else first.prepared


def _pulled(made: Global, index: int, cotangent: DTensor, others: Sequence[DTensor]) -> DTensor:
    """The gradient of one operand."""
    back = _gradient(made, index, _arriving(cotangent))
    if torch_private.autocast_may_be_on():
        # Operands have been cast; backward runs inside of the block that the forward ran in, or outside.
        with torch.autocast(cotangent.device.type, enabled=False):
            return _applied_back(back, cotangent, others)
    return _applied_back(back, cotangent, others)


def _applied_back(back: Global, cotangent: DTensor, others: Sequence[DTensor]) -> DTensor:
    if torch.is_grad_enabled():
        return _apply_linear(back, cotangent, *others)
    return back.run((cotangent, *others), owned=False)  # nobody changes a gradient before a leaf has it


@_per_program
def _gradient(made: Global, index: int, spec: Spec) -> Global:
    """The program of the gradient of operand `index`, for a cotangent with this spec."""
    arrived = _arrived(made.recipe, made, spec)

    def of(forward: Recipe) -> Recipe:
        return gradient_of(forward, index, arrived)

    _, dtype = both(made.program.comm_dtype)
    return _global(made.program.extents.derived(of), made.device_mesh, (dtype, dtype))


def gradient_of(forward: Recipe, index: int, arrived: Sharding) -> Recipe:
    """The recipe of an operand's gradient; of a maximum, of what takes a value to each place that may have it."""
    if forward.kind != "reduce" or forward.op in _LINEAR_OPS:
        return gradient(forward, index, arrived)
    # What is compared with the operand, element by element, lies as the operand does.
    return gradient(as_sum(forward), index, arrived, False)


def _arrived(forward: Recipe, made: Global, spec: Spec) -> Sharding:
    """How a cotangent is sharded, on the mesh of the forward."""
    found = sharding_of_spec(spec)
    if found.mesh.universe != forward.mesh.universe or found.mesh.layouts != forward.mesh.layouts:
        raise MeshError(f"the gradient of a tensor on {forward.mesh!r} came on {found.mesh!r}\nin  {forward.text}")
    return found.on(forward.mesh)


def as_sum(forward: Recipe) -> Recipe:
    """The sum with the same names: its gradient takes a value to every place that was reduced to it."""

    def summed(sharding: Sharding) -> Sharding:
        entries = tuple(PendingReduction("sum", p.axes) for p in sharding.pending)
        return replace(sharding, pending=entries)

    result = forward.result
    kept = replace(
        result,
        derived=summed(result.derived),
        target=summed(result.target),
        output=summed(result.output),
    )
    return replace(forward, op="sum", result=kept)


def _apply_extreme(made: Global, x: DTensor) -> DTensor:
    """A maximum or minimum. The gradient goes to where it was reached, in equal parts."""

    def back(cotangent: DTensor, _: tuple[bool, ...], kept: Kept) -> DTensor:
        x, y = kept
        cotangent = _on_names(made, cotangent)
        _check_resolved(made.recipe)
        spread, there = (_gradient(made, 0, _arriving(each)) for each in (y, cotangent))
        local = torch_private.local_of(x)
        reached = (local == spread.program.run(torch_private.local_of(y))).to(local.dtype)
        count = spread.program.run(_counting(made).run(reached))
        return _scaled(_apply_linear(there, cotangent), reached / count)

    return around(lambda x: made.run((x,)), back, x, keep=(True, True))


def _scaled(x: DTensor, factor: torch.Tensor) -> DTensor:
    """A DTensor whose shard is multiplied by a constant, element by element."""
    spec = torch_private.spec_of(x)

    def run(x: DTensor) -> DTensor:
        value, shape = (torch_private.local_of(x) * factor).contiguous(), tuple(spec.shape)
        return torch_private.dtensor(
            value, torch_private.dtensor_spec(spec.mesh, spec.placements, shape, strides_of(shape), value.dtype)
        )

    def back(cotangent: DTensor) -> DTensor:
        return _scaled(resharded(cotangent, replace(sharding_of_spec(spec), pending=())), factor)

    return linear(run, back, x)


@_per_program
def _counting(made: Global) -> BoundRecipe:
    """The sum with the same names as a maximum."""
    return bind(made.program.extents.derived(as_sum), "global")


def _check_resolved(made: Recipe) -> None:
    pending = [p for s in (made.inputs[0].source, made.result.output) for p in s.pending]
    if pending:
        raise ShardingError(
            f"a {made.op} is differentiable where it is resolved in the same expression; found {pending[0]} pending\n"
            f"in  {made.text}\nname its axes on the left and leave out the '|'"
        )


def _on_shards(made: Global, x: DTensor) -> DTensor:
    """A product or a function of the caller's: differentiated by torch on this rank's shard.

    Ranks with the same shard do the same, so that each has the whole gradient of it.
    """
    changes = Changes()
    shard = leave_global(x, counted_whole(x.placements), changes)
    changes.watch(x, shard)
    value = made.program.run(shard)
    if _are_one(value, shard):
        value = value.clone()
    spec = _spec_around(made, value)
    stride = tuple(spec.tensor_meta.stride)
    return enter_global(value, spec.mesh, spec.placements, spec.shape, stride, counted_whole(spec.placements), changes)


# --- autocast


def _cast(x: DTensor, dtype: torch.dtype) -> DTensor:
    own = x.dtype
    return x if dtype is own else linear(lambda x: _converted(x, dtype), lambda g: _cast(g, own), x)


def _converted(x: DTensor, dtype: torch.dtype) -> DTensor:
    """The tensor in another dtype, sharded and pending as it is; torch's own `to` may resolve what is pending."""
    local, spec = torch_private.local_of(x), torch_private.spec_of(x)
    found = local.to(dtype)
    strides = tuple(spec.tensor_meta.stride) if found.stride() == local.stride() else strides_of(tuple(spec.shape))
    return torch_private.dtensor(
        found, torch_private.dtensor_spec(spec.mesh, spec.placements, tuple(spec.shape), strides, dtype)
    )


__all__ = ["Global", "apply_global"]
