"""Laws of calls: one text for tensors of many sizes, many tensors in one call, and dropout in every sharding."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tests.flow_cases import case
from tests.whole_cases import Draw, refusal
from tests.whole_laws import (
    call_of,
    cotangent,
    make_door,
    make_whole,
    mesh_of,
    next_grid,
    pending_in,
    refusal_of_case,
    result_shape,
    spec_of_case,
)


def sizes(d: Draw) -> None:
    """One expression for several sizes of its names, one call after the other, is each time that of the whole tensors."""
    p = d.program
    grid, g = d.grid(computed=True)
    found = case(d.random, kind=d.random.choice(("rearrange", "reduce", "reduce", "repeat", "einsum")), mesh=grid.mesh)
    grouped = {n for slots in (*found.operands, found.result) for slot in slots if len(slot) > 1 for n in slot}
    pendings = list(map(pending_in, found.shardings))
    said = {name for name in found.sizes if f"{name}=" in found.text}
    for number in range(3):
        drawn = {n: d.random.choice((1, 2, 3, 4, 5, 6, 7, 8)) for n in found.sizes if n not in grouped | said}
        now = replace(found, sizes={**found.sizes, **drawn} if number else found.sizes)
        shapes = [tuple(math.prod(now.sizes[n] for n in slot) for slot in slots) for slots in now.operands]
        specs = [spec_of_case(grid, now, slots, now.places, q) for slots, q in zip(now.operands, pendings, strict=True)]
        if any(math.prod(shape) > 2000 for shape in (*shapes, result_shape(now))):
            continue
        if any(refusal(grid, spec, shape) for spec, shape in zip(specs, shapes, strict=True)):
            continue
        names = [f"{name}{number}" for name in "uvw"[: len(specs)]]
        for name, spec, shape in zip(names, specs, shapes, strict=True):
            d.note(grid, spec, shape)
            make_whole(d, name.upper(), shape, torch.float64, g)
            make_door(d, name, name.upper(), grid, g, spec, d.seed())
        # A name that is a dim has its size from there; the same text and the same keywords for all of them.
        alone = {s[0] for slots in now.operands for s in slots if len(s) == 1}
        line = call_of(now, names, mesh_of(g)).replace(f"sizes={now.given}", f"sizes={ {n: s for n, s in now.given.items() if n not in alone} }")  # fmt: skip
        result = spec_of_case(grid, now, now.result, now.goals)
        reason = refusal_of_case(grid, now, result)
        if reason:
            p.refuse(line, reason)
            continue
        d.features.add("another size") if number else None
        p.do(f"y = {line}")
        wholes = ", ".join(name.upper() for name in names)
        p.do(f"same(axes.unshard(y), whole_result({now.kind!r}, {now.text!r}, {now.op!r}, [{wholes}], {now.sizes}))")


def many(d: Draw) -> None:
    """Many tensors that are resharded at once are each as by itself."""
    p = d.program
    grid, g = d.grid(elsewhere=0.1)
    to, t = next_grid(d, grid, 0.3)
    if grid.here is None and to.here is None:
        p.refuse(f"axes.reshard({{'a': axes.from_local(torch.ones(0), 'd0', mesh={mesh_of(g)}, shape=(3,))}}, {{'a': 'd0'}}, mesh={mesh_of(t)})", "rank")  # fmt: skip
        return
    cases = {}
    for name in "abcdef"[: d.random.choice((1, 2, 3, 6))]:
        shape = d.shape(d.random.choice((1, 2, 2, 3)))
        dtype = d.random.choice((torch.float64, torch.float64, torch.float32, torch.bfloat16))
        spec = d.accepted(grid, shape, pending=0.2, ops=("sum", "mean"))
        cases[name] = shape, spec, d.accepted(to, shape), d.seed()
        d.note(grid, spec, shape)
        make_whole(d, name.upper(), shape, dtype, g)
        make_door(d, name, name.upper(), grid, g, spec, cases[name][3])
    d.features.add(f"{len(cases)} at once")
    given = f"{{{', '.join(f'{n!r}: {n}' for n in cases)}}}"
    wanted = f"{{{', '.join(f'{n!r}: {mesh_of(t)}.sharding({c[2]!r}).sized({c[0]})' for n, c in cases.items())}}}"
    p.do(f"many = axes.reshard({given}, {wanted})")
    for name, (_, spec, target, seed) in cases.items():
        p.do(f"check(many[{name!r}], {name.upper()}, {t}, {target!r}, {seed}, ({g}, {spec!r}))")


def dropout(d: Draw) -> None:
    """The same elements are dropped in every sharding, in both views, and of the gradient as well."""
    p = d.program
    grid, g = d.grid()
    shape, chance, seed = d.shape(), d.random.choice((0.1, 0.5, 0.9, 1.0)), d.seed()
    local = d.chance(0.4)
    forms = d.forms(shape, numbers=0.0)
    spec = d.spec(grid, forms, indivisible=0) if local else d.accepted(grid, shape)
    d.note(grid, spec, shape)
    make_whole(d, "W", shape, torch.float64, g)
    given = f"seed={seed}" if d.chance(0.5) else ""
    p.do("W.requires_grad_()")
    p.do(f"torch.manual_seed({seed}); Y = axes.nn.dropout(W, {chance}, {given})")
    if local:
        d.features.add("local view")
        sizes = {n: s for form in forms for n, s in form if s}
        make_whole(d, "C", shape, torch.float64, g)
        p.do(f"x, c = (part(each, {g}, {spec!r}) for each in (W, C))")
        given = f"{spec!r}, mesh={mesh_of(g)}, sizes={sizes}, {given}"
    else:
        p.do("X = W.detach()")
        make_door(d, "x", "X", grid, g, spec, d.seed())
        cotangent(d, "c", "X", grid, g, spec)
    p.do(f"torch.manual_seed({seed}); y = axes.nn.dropout(x.requires_grad_(), {chance}, {given})")
    p.do("y.backward(c); Y.backward(C)")
    p.do(f"check(y, Y, {g}, {spec!r})")
    p.do(f"check(x.grad, W.grad, {g}, {spec!r})")
