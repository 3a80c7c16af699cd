"""Generated expressions: text, shardings of the operands, and what einops says about the whole.

`case(random)` draws a mesh, names with sizes and splits, operands (with groups, some of whose factors
are split), which names are explicit, where the right side moves them, and what is pending. It is
drawn so that the expression is right; what DTensor can't express may still be refused.
"""

from __future__ import annotations

import math
import random as stdlib_random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import einops
import numpy as np
import torch

from axes import Layout, Mesh, Sharding
from tests.strategies import place

Random = stdlib_random.Random

MESHES = (
    *("tp=1", "tp=2", "tp=3", "dp=2 tp=2", "dp=3 tp=2", "dp=2 tp=4", "dp=2 cp=2 tp=2", "dp=2 cp=1 tp=2", "tp=5"),
    *("dp=3 cp=2 tp=2; both = cp tp", "dp=4 cp=2 tp=2; both = cp tp; ring = dp cp"),
)
NAMES = "abcdefg"

Slot = tuple[str, ...]


@dataclass
class Case:
    """A right expression. `wholes` are the global operands; `expected` is what einops makes of them."""

    kind: str
    op: str
    mesh: Mesh
    text: str
    shardings: tuple[Sharding, ...]
    wholes: tuple[torch.Tensor, ...]
    sizes: dict[str, int]
    explicit: set[str] = field(default_factory=set)
    seed: int = 0
    operands: tuple[tuple[Slot, ...], ...] = ()
    result: tuple[Slot, ...] = ()
    places: dict[str, list[str]] = field(default_factory=dict)
    """The axes that split each name in the operands."""
    goals: dict[str, list[str]] = field(default_factory=dict)
    """The axes that split each name of the result."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(whole.shape) for whole in self.wholes)

    @property
    def given(self) -> dict[str, int]:
        """The sizes that can be said: text has no 0."""
        return {name: size for name, size in self.sizes.items() if size}

    def expected(self, wholes: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        return whole_result(self.kind, self.text, self.op, self.wholes if wholes is None else wholes, self.sizes)

    def __repr__(self) -> str:
        operands = ", ".join(f"{s.spec} {list(shape)}" for s, shape in zip(self.shardings, self.shapes, strict=True))
        return f"{self.kind} {self.op} {self.text!r} of {operands} on {self.mesh!r} with {self.sizes}"


def stripped(text: str) -> str:
    """An expression without `@` and `|`: what einops understands."""
    left, right = text.split("->")
    plain = ",".join(re.sub(r"\|.*", "", spec) for spec in left.split(",")) + "->" + re.sub(r"\|.*", "", right)
    return re.sub(r"@(\([^)]*\)|[a-z*]+)", "", plain)


def whole_result(kind: str, text: str, op: str, wholes: Sequence[torch.Tensor], sizes: dict[str, int]) -> torch.Tensor:
    """einops on whole tensors; an einsum of grouped dims by way of their factors."""
    pattern = stripped(text)
    if kind == "einsum":
        left, right = pattern.split("->")
        bare = re.sub(r"[()]", "", pattern)
        terms = [re.findall("[a-z]+", spec) for spec in left.split(",")]
        opened = [w.reshape([sizes[name] for name in term]) for w, term in zip(wholes, terms, strict=True)]
        if all(w.is_floating_point() or w.is_complex() for w in wholes):
            result = einops.einsum(*opened, bare)
        else:
            # torch has another dtype where a name of one operand is summed, unless its size is one.
            counts = Counter(name for term in terms for name in {*term})
            alone = any(count == 1 and name not in re.findall("[a-z]+", right) for name, count in counts.items())
            result = einops.einsum(*[w.long() for w in opened], bare).to(torch.int64 if alone else wholes[0].dtype)
        return result.reshape([math.prod(sizes[n] for n in slot) for slot in slots_of(right)])
    inside = {name: sizes[name] for name in set(re.findall("[a-z]+", pattern)) & set(sizes) if sizes[name]}
    if kind == "reduce":
        return einops.reduce(wholes[0], pattern, op, **inside)
    return getattr(einops, kind)(wholes[0], pattern, **inside)


def slots_of(spec: str) -> list[Slot]:
    return [tuple(re.findall("[a-z]+", word)) for word in re.findall(r"\([^)]*\)|[a-z]+", spec)]


def case(random: Random, kind: str | None = None, everything_explicit: bool = False, mesh: Mesh | None = None) -> Case:
    kind = kind or random.choice(["rearrange", "reduce", "repeat", "einsum", "einsum"])
    op = random.choice(["sum", "mean", "max", "min"]) if kind == "reduce" else "sum"
    mesh = Mesh(*random.choice(MESHES).split("; ")) if mesh is None else mesh
    names = list(NAMES[: random.randint(1, 5)])
    axes = list(mesh.axis_names)
    random.shuffle(axes)
    places: dict[str, list[str]] = {name: [] for name in names}
    for axis in axes:
        if random.random() < 0.6:
            places[random.choice(names)].append(axis)
    contracted, added, operand_names = _roles(random, kind, names)
    grouped_operands = [_grouped(random, found) for found in operand_names]
    result_names = [n for n in names if n not in contracted]
    random.shuffle(result_names)
    result = _grouped(random, result_names)
    in_groups = {n for slots in [*grouped_operands, result] for slot in slots if len(slot) > 1 for n in slot}
    for name in added:
        places[name] = []
    sizes = {}
    for name in names:
        count = math.prod(mesh.names[a] for a in places[name])
        even = name in in_groups or random.random() < 0.6
        larger = (10, 14, 22, 30) if len(places[name]) > 1 else ()
        sizes[name] = count * random.randint(1, 3) if even else random.choice((1, 1, 2, 3, 4, 5, 6, 7, *larger))
        if name not in in_groups and name not in {*contracted, *added} and random.random() < 0.04:
            sizes[name] = 0
    if kind == "reduce" and random.random() < 0.15:
        # A reduction over one element, of which other ranks have none.
        sizes.update({name: 1 for name in contracted if name not in in_groups})
    explicit = {n for n in names if everything_explicit or random.random() < 0.45}
    flowing_axes = {a for n in names if n not in explicit and n not in contracted for a in places[n]}
    pending = _pending(
        random, kind, op, [a for a in axes if not any(a in p for p in places.values())], len(operand_names)
    )
    hidden = {a for n in contracted if n not in explicit for a in places[n]}
    # The right side: explicit names go wherever an axis is free.
    busy = flowing_axes | {axis for entries in pending for _, axis in entries}
    free = [a for a in axes if a not in busy]
    random.shuffle(free)
    goals: dict[str, list[str]] = {name: [] for name in names}
    keepers = [n for n in result_names if n in explicit]
    for name in keepers:
        if random.random() < 0.2:
            goals[name] = list(places[name])
    free = [a for a in free if not any(a in goal for goal in goals.values())]
    arising = {a for n in contracted for a in places[n]}
    keep_any = (bool(hidden) and random.random() < 0.5) or random.random() < 0.1
    for axis in free:
        if keepers and random.random() < 0.6 and not (keep_any and axis in arising):
            goals[random.choice(keepers)].append(axis)
    text_axes = {a for n in explicit for a in [*places[n], *goals[n]]}
    clause = " | *" if keep_any else ""
    if hidden - text_axes and not keep_any:
        clause = " |"
        pending = [[] for _ in pending] if random.random() < 0.5 else pending
    places, goals = ({n: _flattened(random, mesh, by) for n, by in of.items()} for of in (places, goals))
    left = []
    for slots, entries in zip(grouped_operands, pending, strict=True):
        written = [(o, a) for o, a in entries if a in text_axes or random.random() < 0.3]
        text_axes |= {a for _, a in written}
        left.append(_spec(random, slots, places, explicit) + ("" if not written else " | " + _clause(written)))
    if not clause:
        kept = [(o, a) for entries in pending for o, a in entries if a in text_axes and random.random() < 0.5]
        clause = f" | {_clause(kept)}" if kept else ""
    text = f"{', '.join(left)} -> {_spec(random, result, goals, explicit)}{clause}"
    shardings, wholes = [], []
    seed = random.randrange(2**31)
    numbers = np.random.default_rng(seed)
    for slots, entries in zip(grouped_operands, pending, strict=True):
        dims = " ".join(_dim(slot, places, sizes) for slot in slots)
        shardings.append(mesh.sharding(f"{dims} | {_clause(entries)}" if entries else dims))
        shape = [math.prod(sizes[n] for n in slot) for slot in slots]
        wholes.append(torch.from_numpy(numbers.integers(-4, 5, shape).astype(np.float64)))
    ends = {name: goals[name] if name in explicit else places[name] for name in result_names}
    operands = tuple(map(tuple, grouped_operands))
    splits = places, ends
    return Case(
        kind, op, mesh, text, tuple(shardings), tuple(wholes), sizes, explicit, seed, operands, tuple(result), *splits
    )


def _roles(random: Random, kind: str, names: list[str]) -> tuple[set[str], set[str], list[list[str]]]:
    """Which names are contracted, which are added, and the names of each operand in order."""
    shuffled = random.sample(names, len(names))
    some = set(random.sample(names, random.randint(0, len(names) - 1)))
    if kind == "rearrange":
        return set(), set(), [shuffled]
    if kind == "reduce":
        return some, set(), [shuffled]
    if kind == "repeat":
        return set(), some, [[n for n in shuffled if n not in some]]
    count = random.randint(1, 3)
    operands: list[list[str]] = [[] for _ in range(count)]
    for name in shuffled:
        for index in random.sample(range(count), random.randint(1, count)):
            operands[index].append(name)
    return some, set(), operands


def _grouped(random: Random, names: list[str]) -> list[Slot]:
    slots: list[Slot] = []
    rest = list(names)
    while rest:
        count = min(len(rest), random.choice((2, 2, 3))) if random.random() < 0.25 else 1
        slots.append(tuple(rest[:count]))
        del rest[:count]
    return slots


def _flattened(random: Random, mesh: Mesh, axes: list[str]) -> list[str]:
    """The axes, of which two neighbours may stand by the one name that the mesh has for both."""
    for at in range(len(axes) - 1):
        both = Layout.product(*(mesh.axis(axis).layout for axis in axes[at : at + 2]))
        name = next((name for name in mesh.names if mesh.axis(name).layout == both), None)
        if name is not None and random.random() < 0.5:
            return [*axes[:at], name, *axes[at + 2 :]]
    return axes


def _pending(random: Random, kind: str, op: str, free: list[str], count: int) -> list[list[tuple[str, str]]]:
    """What each operand has pending, each axis in at most one of them."""
    found: list[list[tuple[str, str]]] = [[] for _ in range(count)]
    ops = ["sum", "mean"] if kind in ("einsum", "repeat") or op in ("sum", "mean") else [op]
    chosen = random.choice(ops)
    for axis in free:
        if random.random() < 0.4:
            found[random.randrange(count)].append((chosen, axis))
    return found


def _clause(entries: list[tuple[str, str]]) -> str:
    return " ".join(f"{op}@{axis}" for op, axis in entries)


def _place(axes: list[str]) -> str:
    return f"@{axes[0]}" if len(axes) == 1 else f"@({' '.join(axes)})"


def _spec(random: Random, slots: list[Slot], places: dict[str, list[str]], explicit: set[str]) -> str:
    def one(name: str) -> str:
        bare = name not in explicit or (not places[name] and random.random() < 0.7)
        return name if bare else name + _place(places[name])

    return " ".join(one(s[0]) if len(s) == 1 else f"({' '.join(map(one, s))})" for s in slots)


def _dim(slot: Slot, places: dict[str, list[str]], sizes: dict[str, int]) -> str:
    """A dim of an operand, in which a group that is split in its first name alone is one name."""
    if len(slot) == 1:
        return slot[0] + place(places[slot[0]])
    if not any(places[name] for name in slot[1:]):
        return f"({' '.join(slot)}){place(places[slot[0]])}"
    return f"({' '.join(f'{name}={sizes[name]}{place(places[name])}' for name in slot)})"
