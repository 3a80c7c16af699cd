"""Operations on DTensors: one autograd function per call, whose gradient is one more recipe.

    y = on_dtensors(made, (x, w))        # `made` is bound to tensors like these

The shards are taken out, the operation runs on them outside of autograd, and a DTensor is put around
the result. Backward takes the cotangent in whatever sharding it comes: the gradient's recipe is
derived from the forward's (`axes.algebra.expressions.gradient`), applied the same way, and can be
differentiated again. What a gradient has pending stays so until something needs it: a leaf resolves
its own once, when everything that goes into it has been added up.

What isn't linear (a maximum, a product, the caller's function) is differentiated on the shards, as in a
region of this one operation.

A spec (torch's `DTensorSpec`) is one object for all results that know the same, so that the next call finds it by
identity.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import MeshError, ShardingError
from axes.algebra.expressions import Recipe, gradient, unmoved
from axes.algebra.layout import Layout
from axes.algebra.sharding import EXTREMES, LINEAR, Sharding, pending_text
from axes.ops import autocast
from axes.ops.recipes import BoundRecipe, at_sizes
from axes.runtime import torch_private, watching
from axes.runtime.border import Changes, check_closed, counted_as_same, enter_global, on_shards, spec_around, used
from axes.runtime.graphs import hints
from axes.runtime.groups import of_world
from axes.runtime.linear import Kept, linear
from axes.runtime.operation import PLAIN
from axes.runtime.redistribute import Route, Spec, both, route, spec_at
from axes.runtime.torch_placements import sharding_of_spec, torch_placements
from axes.runtime.watching import within

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


def _run(made: BoundRecipe, *operands: DTensor, owned: bool = True) -> DTensor:
    """The operation on DTensors, outside of autograd.

    If `owned`, the result shares no memory with an operand: autograd wouldn't see a change of it.
    """
    locals_ = tuple(map(torch_private.local_of, operands))
    local = made.run(*locals_)
    if owned and made.may_be_view and _are_one(local, locals_[0]):
        local = local.clone()
    return torch_private.dtensor(local, spec_around(local, made.device_mesh, made.placements, made.shape))


def _are_one(local: torch.Tensor, operand: torch.Tensor) -> bool:
    """Whether two tensors share memory; of what is traced that isn't known."""
    return type(local) not in PLAIN or torch_private.memory_of(local) == torch_private.memory_of(operand)


def on_dtensors(made: BoundRecipe | Route, operands: Sequence[DTensor]) -> DTensor:
    """The operation on DTensors, leaves among them."""
    for x in operands if torch.is_grad_enabled() else ():
        used(x)
    return on_used(made, operands)


def on_used(made: BoundRecipe | Route, operands: Sequence[DTensor]) -> DTensor:
    """The operation on DTensors, none of them a leaf whose gradient isn't resolved."""
    if isinstance(made, Route):
        return made.take(operands[0])
    # A caller's function may use a tensor that isn't an operand, or write to the one that is.
    run: Callable[..., DTensor] = _on_shards if callable(made.recipe.op) else _run
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, operands)):
        is_linear = made.recipe.kind != "reduce" or made.recipe.op in LINEAR
        run = _apply_linear if is_linear else _on_shards
    if torch_private.autocast_may_be_on():
        return autocast.applied(made.recipe, functools.partial(run, made), operands, _cast)
    return run(made, *operands)


# --- gradients


def _apply_linear(made: BoundRecipe, *operands: DTensor) -> DTensor:
    """What is linear in each operand. The gradient is a recipe of the same kind, and differentiable."""

    def back(cotangent: DTensor, needed: tuple[bool, ...], kept: Kept) -> tuple[DTensor | None, ...]:
        given = made, needed, cotangent, kept[:-1]
        if watching.listeners:
            return within(f"gradient of {made.recipe.kind}", made.recipe.text, _gradients, *given)
        return _gradients(*given)

    # An operand is kept for the gradients of the others.
    needed = list(map(_REQUIRES_GRAD, operands))
    keep = [sum(needed) > own for own in needed]
    return linear(functools.partial(_run, made), back, *operands, keep=(*keep, False))  # type: ignore[no-any-return]


def _gradients(
    made: BoundRecipe, needed: tuple[bool, ...], cotangent: DTensor, operands: Sequence[DTensor | None]
) -> tuple[DTensor | None, ...]:
    """The gradients of all operands that need one."""
    spec = torch_private.spec_of(cotangent)
    if type(torch_private.local_of(cotangent)) is not torch.Tensor:
        # In a graph sizes may be symbols, and strides where no size is one.
        spec = spec_at(spec, tuple(spec.shape) if made.sized else hints(spec.shape))
    brought, back = (_find_way_back if made.sized else _way_back)(made, needed, spec)
    if brought is not None:
        cotangent = brought.take(cotangent)
    # Nobody changes a gradient before a leaf has it.
    run, found = _apply_linear if torch.is_grad_enabled() else functools.partial(_run, owned=False), list[Any]()
    # Operands have been cast; backward runs inside of the block of autocast that the forward ran in, or outside.
    state = torch.autocast(cotangent.device.type, enabled=False) if torch_private.autocast_may_be_on() else _AS_IT_IS
    with state:
        for index in range(len(needed)):
            others = *operands[:index], *operands[index + 1 :]
            found.append(run(back[index], cotangent, *others) if index in back else None)
    return tuple(found)


_AS_IT_IS = contextlib.nullcontext()


def _find_way_back(
    made: BoundRecipe, needed: tuple[bool, ...], spec: Spec
) -> tuple[Route | None, dict[int, BoundRecipe]]:
    """Where a cotangent with this spec is brought first, if anywhere, and the gradient of each operand that needs one.

    It is brought to what several gradients need, or to splits that fall on the names of the expression.
    """
    arrived, (_, dtype) = _arrived(made.recipe, spec), both(made.comm_dtype)
    wanted = [index for index, need in enumerate(needed) if need]
    gradients = [gradient(made.recipe, index, arrived) for index in wanted]
    first, brought = gradients[0].inputs[0], None
    target = shared_cotangent(gradients) if len(gradients) > 1 else None
    if target is None and not unmoved(arrived, first.tensor, gradients[0].whole(first.groups)):
        target = first.tensor
    if target is not None:
        brought = route(spec, target, (dtype, dtype))
        arrived = _arrived(made.recipe, brought.spec)
    back = {}
    for index in wanted:
        found = gradient(made.recipe, index, arrived)
        sized = None if made.sized is None else at_sizes(found, made.sized.sizes)
        back[index] = BoundRecipe(found, sized, made.device_mesh, (dtype, dtype))
    return brought, back


_way_back = of_world(8192)(_find_way_back)


def shared_cotangent(gradients: Sequence[Recipe]) -> Sharding | None:
    """Where the gradients of several operands all want the cotangent: then it is brought there once for all of them.

    None where they don't agree, or want it where it is.
    """
    inputs = [each.inputs[0] for each in gradients]
    first = inputs[0]
    if any(len(group) != 1 for i in inputs for group in i.groups) or any(i.computed != first.computed for i in inputs):
        return None
    return None if unmoved(first.tensor, first.computed, gradients[0].whole(first.groups)) else first.computed


def _arrived(forward: Recipe, spec: Spec) -> Sharding:
    """How a cotangent is sharded, on the mesh of the forward."""
    found = sharding_of_spec(spec)
    if found.mesh.universe != forward.mesh.universe or found.mesh.layouts != forward.mesh.layouts:
        raise MeshError(f"the gradient of a tensor on {forward.mesh!r} came on {found.mesh!r}\nin  {forward.text}")
    return found.on(forward.mesh)


def _on_shards(made: BoundRecipe, x: DTensor) -> DTensor:
    """What isn't linear: differentiated by torch on this rank's shard, as in a region of this one operation."""
    changes, found = Changes(), made.recipe
    pending = [entry for each in (found.inputs[0].tensor, found.result.tensor) for entry in each.pending]
    if pending and found.op in EXTREMES:
        return linear(functools.partial(_run, made), functools.partial(_refuse, made.recipe, pending[:1]), x)
    counted, counted_result = _crossing(found.inputs[0].tensor, made.placements)
    (shard,), value = on_shards(lambda shards: made.on_shards.run(*shards), (x,), (counted,), changes)
    changes.watch([(x, shard)])
    try:
        check_closed((value,))
    except ShardingError as error:
        raise ShardingError(f"{error}\n  in  {found.text}") from None
    if _are_one(value, shard):
        value = value.clone()
    return enter_global(value, made.device_mesh, made.placements, made.shape, counted_result, changes)


@functools.lru_cache(maxsize=4096)
def _crossing(source: Sharding, result: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The placements by which the gradients of a tensor and of the result cross the borders of such a region.

    Over an axis along which both are replicated each rank computes the same, and has the whole gradient; over any other
    the gradients of copies add up.
    """
    placements, mesh = torch_placements(source), source.mesh
    axes = zip(mesh.layouts, placements, result, strict=True)
    whole = tuple([layout for layout, a, b in axes if a.is_replicate() and b.is_replicate() and layout.size > 1])
    return counted_as_same(mesh, placements, whole), counted_as_same(mesh, result, whole)


def _refuse(found: Recipe, pending: Sequence[tuple[str, Layout]], _: DTensor) -> NoReturn:
    raise ShardingError(
        f"a {found.op} is differentiable where it is resolved in the same expression; found "
        f"{pending_text(found.mesh, pending)} pending\nin  {found.text}\n"
        "name its axes on the left and leave out the '|', or call it with torch.no_grad()"
    )


# --- autocast


def _cast(x: DTensor, dtype: torch.dtype) -> DTensor:
    own = x.dtype
    return x if dtype is own else linear(lambda x: _converted(x, dtype), lambda g: _cast(g, own), x)


def _converted(x: DTensor, dtype: torch.dtype) -> DTensor:
    """The tensor in another dtype, sharded and pending as it is; torch's own `to` may resolve what is pending."""
    local, spec = torch_private.local_of(x).to(dtype), torch_private.spec_of(x)
    return torch_private.dtensor(local, spec_around(local, spec.mesh, spec.placements, tuple(spec.shape)))
