"""What differs between a program on several ranks and on one, from what they saw.

    differences = judged({"dp": 2, "tp": 2}, seen_by_rank, seen_on_one, Limits())

Outputs and gradients are judged. Where an output is wrong, the modules' outputs tell where it went wrong: the first of
them that is neither the one device's, nor split, nor pending. What is pending is right where a collective follows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from axes.nn.diagnosis import (
    Clues,
    Coordinate,
    Cut,
    Finding,
    Parts,
    Piece,
    Tolerance,
    axes_of_factor,
    diagnosed,
    differing,
    fitting,
    is_close,
    is_rounded,
    is_share,
    largest_of,
    words,
)
from axes.nn.observed import Observed


@dataclass(frozen=True)
class Mismatch:
    """One tensor that isn't the one device's.

    name: of the parameter, module or output. what: "module", "gradient", "every gradient", "output", "value",
    "stepped" (a value that began right), "order" or "random" (numbers drawn before what differs). text: what the tensor
    is instead. axes, factor: over which mesh axes, and how many times the right one, where that is known. error: the
    largest difference, relative to the largest value. kind: of the relation, in a word.
    """

    name: str
    what: str
    text: str
    axes: tuple[str, ...] = ()
    factor: float | None = None
    error: float = 0.0
    kind: str = "none"

    def __str__(self) -> str:
        """One line: `blocks.0.norm.weight: its gradient is pending over tp (its sum is right)`."""
        over = "" if self.kind not in ("factor", "every", "added") or not self.axes else f" over {words(self.axes)}"
        missing = ""
        of_loss = self.kind == "every" or (self.what == "output" and self.kind in ("factor", "pending"))
        if self.axes and self.factor and of_loss:
            names = words(self.axes)
            too_large = abs(self.factor) > 1
            missing = f": a mean over {names} is missing" if too_large else f": divided by {names} once too often"
        text = self.text + over + missing
        if self.what == "module":
            return f"{self.name}: its output is {text}"
        if self.what == "gradient":
            return f"{self.name}: its gradient is {text}"
        if self.what == "order":
            return f"{self.name} {text}"
        if self.what == "stepped":
            return f"{self.name}: its value, after the program, is {text}"
        if self.what == "value":
            return f"{self.name}: its value, before anything was trained, is {text}"
        return f"{self.name}: {text}"


@dataclass(frozen=True)
class Limits:
    """Tolerances as the caller gave them; None for those that follow from the dtype.

    narrow: a dtype narrower than double precision in which the program computes something.
    """

    relative: float | None = None
    absolute: float | None = None
    narrow: torch.dtype | None = None

    def of(self, x: torch.Tensor, noise: float) -> Tolerance:
        """The tolerance of a tensor that rounding moves by `noise` (see `Observed`)."""
        if not is_rounded(x):
            return Tolerance(0.0, 0.0)
        precision = max(_PRECISION.get(x.dtype, _DOUBLE), _INSIDE.get(self.narrow, 3e-2))
        relative = precision if self.relative is None else self.relative
        beyond = max(0.0, _NOISES * noise - relative * largest_of(x))  # most noise is as large as `relative` allows
        return Tolerance(relative, beyond if self.absolute is None else self.absolute)


_NOISES = 4
"""How many times as large as the measured noise a rounding error may be."""

_DOUBLE = 1e-9
_PRECISION = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_INSIDE: dict[torch.dtype | None, float] = {
    None: _DOUBLE,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 5e-3,
}
"""What may differ, relatively, where a program of double precision computes something in a narrower dtype."""


def judged(
    sizes: Mapping[str, int],
    ranks: Sequence[Observed],
    one: Observed,
    limits: Limits,
    counts: Mapping[str, float] | None = None,
) -> list[Mismatch]:
    """What differs, with what to look at first at the front.

    `sizes`: the mesh's axes of more than one rank, in order; ranks follow them row-major. `counts`: see `Clues`.
    """
    places = list(itertools.product(*(range(size) for size in sizes.values())))
    world = _World(sizes, dict(zip(places, ranks, strict=True)), one, limits, counts or {})
    wrong, cuts = world.values()
    values, stepped = ([each for each in wrong if each.what == what] for what in ("value", "stepped"))
    outputs = list(world.outputs())
    gradients = list(world.gradients(cuts, {each.name for each in values}))
    wrong_modules = list(world.first_wrong_module()) if outputs and not values else []
    modules = [each for place, module in wrong_modules for each in (*world.drawn(place), module)]
    known = [each for each in gradients if each.kind not in _UNKNOWN]
    unknown = [each for each in gradients if each.kind in _UNKNOWN]
    causes = [each for each in outputs if each.kind not in (*_MULTIPLES, "shape")]  # which make gradients wrong
    others = [each for each in outputs if each not in causes]
    every = world.every(gradients, bool(causes))
    return [*world.dropout(), *values, *modules, *causes, *every, *others, *known, *unknown, *stepped]


_UNKNOWN = ("none", "differs", "shape")
_MULTIPLES = ("factor", "counted")


def first_wrong(sizes: Mapping[str, int], ranks: Mapping[Coordinate, Observed], one: Observed, limits: Limits) -> int:
    """The place, among all modules in the order in which they are done, of the first whose output is wrong."""
    return next((i for i, _ in _World(sizes, ranks, one, limits, {}).first_wrong_module()), len(one.modules))


@dataclass(frozen=True)
class _World:
    sizes: Mapping[str, int]
    ranks: Mapping[Coordinate, Observed]
    one: Observed
    limits: Limits
    counts: Mapping[str, float]

    def tolerance(self, kind: str, name: str) -> Tolerance:
        """The tolerance of one of the one device's tensors."""
        whole = getattr(self.one, kind)[name]
        x = torch.zeros(()) if whole is None else whole.local
        return self.limits.of(x, self.one.noise.get((kind, name), 0.0))

    def held(self, kind: str, name: str) -> Parts | None:
        """A tensor as those ranks have it that have it at all; where a rank has no gradient, it is zero."""
        found = {place: getattr(seen, kind)[name] for place, seen in self.ranks.items() if name in getattr(seen, kind)}
        pieces = {place: piece for place, piece in found.items() if piece is not None}
        for place in found.keys() - pieces.keys():
            value = self.ranks[place].values[name]
            pieces[place] = dataclasses.replace(value, local=torch.zeros_like(value.local))
        return Parts(self.sizes, dict(sorted(pieces.items()))) if pieces else None

    def values(self) -> tuple[list[Mismatch], dict[str, list[Cut]]]:
        """Parameters that don't start out as on one device, and how those lie that do."""
        wrong, cuts = [], {}
        for name, whole in self.one.values.items():
            held, tolerance = self.held("values", name), self.tolerance("values", name)
            if held is None:
                wrong.append(Mismatch(name, "value", "nowhere: no rank has a parameter of this name", kind="shape"))
                continue
            fits = fitting(held, whole.local, tolerance) or fitting(held, whole.local, tolerance, orders=True)
            if fits:
                cuts[name] = fits
            else:
                found = diagnosed(held, whole.local, tolerance)
                text = f"not the one device's ({found.text}): give both the same, by one seed or parts of one tensor"
                first, begun = self.one.begun.get(name), self.held("begun", name)
                if first and begun and fitting(begun, first.local, tolerance):
                    text = f"not the one device's ({found.text}); it began as that, so what stepped it isn't the same"
                    wrong.append(Mismatch(name, "stepped", text, found.axes, found.factor, found.error, found.kind))
                    continue
                wrong.append(Mismatch(name, "value", text, found.axes, found.factor, found.error, found.kind))
        extra = {name: None for seen in self.ranks.values() for name in seen.values if name not in self.one.values}
        wrong += [Mismatch(name, "value", "of no parameter that one device has", kind="shape") for name in extra]
        return wrong, cuts

    def outputs(self) -> Iterator[Mismatch]:
        """Outputs that differ."""
        for name, whole in self.one.outputs.items():
            held, tolerance = self.held("outputs", name), self.tolerance("outputs", name)
            if held is None:
                yield Mismatch(name, "output", "missing on every rank", kind="shape")
            elif not is_right(held, whole.local, tolerance):
                clues = Clues(added={each: piece.local for each, piece in self.one.values.items()}, counts=self.counts)
                yield _difference(name, "output", diagnosed(held, whole.local, tolerance, clues))
        for name in dict.fromkeys(itertools.chain.from_iterable(seen.outputs for seen in self.ranks.values())):
            if name not in self.one.outputs:
                yield Mismatch(name, "output", "there, though one device has none of this name", kind="shape")

    def gradients(self, cuts: Mapping[str, list[Cut]], skipped: set[str]) -> Iterator[Mismatch]:
        """Gradients that differ, the parameters that are used last first."""
        second = {name for tie in self.one.ties for name in tie[1:] if all(tie in r.ties for r in self.ranks.values())}
        order = self._order()
        names = [name for name in self.one.gradients if name not in skipped and name not in second]
        for name in sorted(names, key=lambda name: order.get(name, -1), reverse=True):
            whole = self.one.gradients[name]
            held, tolerance = self.held("gradients", name), self.tolerance("gradients", name)
            if whole is None:
                if held is not None and any(bool(piece.local.any()) for piece in held.pieces.values()):
                    yield Mismatch(name, "gradient", "there, though on one device it has none", kind="shape")
                continue
            if held is None:
                if largest_of(whole.local) > tolerance.absolute:
                    yield Mismatch(name, "gradient", "missing: no rank has one", factor=0.0, kind="zero")
                continue
            allowed = cuts.get(name) if held.is_plain else None
            if allowed is None:
                fits = bool(fitting(held, whole.local, tolerance))
            else:
                fits = self._fits(held, whole, allowed, tolerance)
            if fits:
                continue
            clues = Clues(uses=self.one.uses.get(name, {}), counts=self.counts, cuts=allowed)
            found = diagnosed(held, whole.local, tolerance, clues)
            if not self._is_of_parts(found):
                yield _difference(name, "gradient", found)
        for name in dict.fromkeys(itertools.chain.from_iterable(seen.gradients for seen in self.ranks.values())):
            held = self.held("gradients", name)
            if name in self.one.values and name not in self.one.gradients and held is not None:
                text = "there, though on one device the parameter is frozen (it has requires_grad=False)"
                yield Mismatch(name, "gradient", text, kind="shape")

    def _is_of_parts(self, found: Finding) -> bool:
        """Whether a gradient is right but for a sum, or for the size of axes that split the outputs.

        Where backward was started here, from outputs that are no scalars, the program doesn't say what it would do with
        the gradients.
        """
        if not self.one.started:
            return False
        if found.kind == "factor":
            return any(set(axes) <= self._split for axes in axes_of_factor(found.factor or 1.0, self.sizes))
        return found.kind == "pending"

    @cached_property
    def _split(self) -> set[str]:
        """The axes that split an output, or over which it is pending."""
        found: set[str] = set()
        for name, whole in self.one.outputs.items():
            held = self.held("outputs", name)
            if held is not None:
                found |= set(held.pending)
                cuts = fitting(held.plain(), whole.local, self.tolerance("outputs", name))
                found |= {axis for cut in cuts[:1] for dim in cut.dims for axis in dim}
        return found

    def _fits(self, held: Parts, whole: Piece, allowed: Sequence[Cut], tolerance: Tolerance) -> bool:
        """Whether a plain gradient is right in one of the cuts that its parameter's value has."""
        x = held.vector({})
        expected = [held.expected(cut, whole.local, {}) for cut in allowed]
        return any(x is not None and y is not None and _are_close(x, y, tolerance) for y in expected)

    def _order(self) -> dict[str, int]:
        """When a parameter is used last: the place of its module among those that ran."""
        modules = {_module(name): i for i, name in enumerate(self.one.modules)}
        return {name: modules.get(name.rpartition(".")[0], -1) for name in self.one.values}

    def every(self, gradients: Sequence[Mismatch], follow: bool) -> list[Mismatch]:
        """One line for all gradients, where all are the same multiple of the right ones.

        The loss is that multiple, unless they `follow` from outputs that are wrong otherwise.
        """
        nonzero = [
            name
            for name, whole in self.one.gradients.items()
            if whole is not None and largest_of(whole.local) > self.tolerance("gradients", name).absolute
        ]
        ties = sum(len(tie) - 1 for tie in self.one.ties)
        factors = {each.factor for each in gradients}
        first = gradients[0] if gradients else None
        if first is None or first.factor is None or first.kind not in ("factor", "counted"):
            return []
        alike = all(each.factor is not None and abs(each.factor / first.factor - 1) < 1e-6 for each in gradients)
        if len(gradients) < 2 or len(gradients) < len(nonzero) - ties or not alike or not factors:
            return []
        kind = "every" if first.kind == "factor" and not follow else first.kind
        text = f"all {len(gradients)} are {first.text}"
        return [Mismatch("every gradient", "every gradient", text, first.axes, first.factor, first.error, kind)]

    def first_wrong_module(self) -> Iterator[tuple[int, Mismatch]]:
        """The place of the first module whose output is wrong, and what that comes of."""
        before: list[tuple[str, Finding]] = []  # what is pending, just before
        for place, (name, whole) in enumerate(self.one.modules.items()):
            held = self.held("modules", name)
            if held is None:
                continue
            tolerance = self.tolerance("modules", name)
            if fitting(held, whole.local, tolerance) or fitting(held, whole.local, tolerance, orders=True):
                before = []
                continue
            found = diagnosed(held, whole.local, tolerance, Clues(self._added(name, before), counts=self.counts))
            if found.kind == "pending" and found.factor is None:
                before.append((name, found))
                continue
            if found.kind == "shape":
                before = []
                continue
            differs = differing(held, tolerance)
            if before and found.kind in (*_UNKNOWN, "summed") and set(before[-1][1].axes) <= set(differs):
                yield place, self._missing(before, name)
            else:
                title = f"{name or 'the model'} ({self.one.kinds.get(_module(name), 'module')})"
                yield place, _difference(title, "module", found)
            return

    def drawn(self, place: int) -> Iterator[Mismatch]:
        """The random numbers that are drawn last before a wrong output, if there are any."""
        before = [at for at in self.one.drawn if at <= place]
        if before:
            text = (
                "random numbers, which axes.verify can't turn off as it does dropout; where another mesh draws others, "
            )
            text += "what follows can't be compared. Turn them off, as by module.eval()"
            yield Mismatch(self.one.drawn[max(before)], "random", text, kind="random")

    def _added(self, name: str, before: Sequence[tuple[str, Finding]]) -> dict[str, torch.Tensor]:
        """What could have been added to a module's output: its parameters, and what was pending before."""
        prefix = f"{_module(name)}." if _module(name) else ""
        added = {each: piece.local for each, piece in self.one.values.items() if each.startswith(prefix)}
        return added | {f"the output of {each}": self.one.modules[each].local for each, _ in before[-1:]}

    def _missing(self, before: Sequence[tuple[str, Finding]], wrong: str) -> Mismatch:
        """That what is pending was used as if it were whole; of the modules of which it is the output the innermost."""
        name, found = before[-1]
        for inner, _ in reversed(before):
            if _module(inner).startswith(_module(name)):
                name = inner
        axes = words(found.axes)
        text = (
            f"{found.text}, and {wrong or 'the model'} after it is wrong: an all-reduce over {axes} is missing after it"
        )
        return Mismatch(name, "module", text, found.axes, None, found.error, "missing")

    def dropout(self) -> Iterator[Mismatch]:
        """The first module that ranks have the same output of without dropout, and different ones with it."""
        for name, whole in self.one.modules.items():
            held, dropped = self.held("modules", name), self.held("dropped", name)
            if held is None or dropped is None:
                continue
            tolerance = self.tolerance("modules", name)
            cuts = fitting(held, whole.local, tolerance)
            split = {axis for cut in cuts[:1] for dim in cut.dims for axis in dim}
            same = set(held.axes) - set(differing(held, tolerance)) - split
            differs = tuple(axis for axis in differing(dropped, tolerance) if axis in same)
            if cuts and differs:
                over = words(differs)
                text = f"different between the ranks of {over}, where it should be the same: dropout draws differently"
                title = f"{name or 'the model'} ({self.one.kinds.get(_module(name), 'module')})"
                yield Mismatch(title, "module", text, differs, None, 1.0, "dropout")
                return


def is_right(held: Parts, whole: torch.Tensor, tolerance: Tolerance) -> bool:
    """Whether an output is the one device's. Nobody says of a plain one how it lies, nor in what order."""
    return bool(fitting(held, whole, tolerance, orders=held.is_plain)) or is_share(held, whole, tolerance)


def _are_close(x: torch.Tensor, y: torch.Tensor, tolerance: Tolerance) -> bool:
    return x.shape == y.shape and is_close(x, y, tolerance)


def _module(name: str) -> str:
    """The module of an output's name: `moe` of `moe[0] (call 2)`."""
    return name.partition("[")[0].partition(" ")[0]


def _difference(name: str, what: str, found: Finding) -> Mismatch:
    return Mismatch(name, what, found.text, found.axes, found.factor, found.error, found.kind)
