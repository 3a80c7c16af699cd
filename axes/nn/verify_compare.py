"""What differs between a program on several ranks and on one, from what they saw.

    differences = judged(Mesh("dp=2 tp=2"), seen_by_rank, seen_on_one, rtol=None, atol=None)

Outputs and gradients are judged. Where an output is wrong, the modules' outputs tell where it went wrong: the first of
them that is neither the one device's, nor split, nor pending. What is pending is right where a collective follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from axes.algebra.mesh import Mesh
from axes.algebra.sharding import Sharding
from axes.nn.verify_diagnosis import Mismatch, Parts, Piece, Tolerance, diagnosed, is_rounded, largest_of, words
from axes.nn.verify_run import Observed

_PRECISION = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""How far numbers of a dtype may be apart, relative to the largest of their tensor."""

_ROUNDING = 500
"""By how many units in the last place of the largest tensor of its kind a tensor may be off."""

_UNKNOWN = ("none", "differs", "some", "shape")


def judged(
    mesh: Mesh, ranks: Sequence[Observed], one: Observed, rtol: float | None, atol: float | None
) -> list[Mismatch]:
    """What differs, with what to look at first at the front.

    `mesh`: a small mesh whose ranks saw `ranks`, in order. `rtol`, `atol`: None for tolerances that follow from dtypes.
    """
    world = _World(mesh, ranks, one, rtol, atol)
    values = list(world.values())
    stepped = [each for each in values if each.what == "stepped"]
    begun = [each for each in values if each.what == "value"]
    outputs = list(world.outputs())
    gradients = [each for each in world.gradients() if each.name not in {value.name for value in begun}]
    causes = [each for each in outputs if each.kind not in ("factor", "shape")]  # which make gradients wrong
    others = [each for each in outputs if each not in causes]
    modules = list(world.modules()) if outputs and not begun else []
    every = world.every(gradients, bool(causes))
    each = sorted(gradients, key=lambda each: each.kind in _UNKNOWN)
    return [*world.dropout(), *begun, *modules, *causes, *every, *others, *([] if every else each), *stepped]


@dataclass(frozen=True)
class _World:
    """All that the ranks of a small mesh saw, beside what one device saw.

    layouts: for each parameter the layouts in which its value is right.
    """

    mesh: Mesh
    ranks: Sequence[Observed]
    one: Observed
    rtol: float | None
    atol: float | None
    layouts: dict[str, list[Sharding]] = field(default_factory=dict)

    def tolerance(self, kind: str, x: torch.Tensor) -> Tolerance:
        """How far a tensor of a kind may be from the one device's `x`."""
        if not is_rounded(x):
            return Tolerance(0.0, 0.0)
        dtype = x.dtype.to_real() if self.one.narrow is None else self.one.narrow
        precision = max(_PRECISION[x.dtype.to_real()], _PRECISION.get(dtype, 3e-2))
        relative = precision if self.rtol is None else self.rtol
        rounding = min(_ROUNDING * torch.finfo(dtype).eps, relative) * self._scales[kind]
        return Tolerance(relative, rounding if self.atol is None else self.atol)

    @cached_property
    def _scales(self) -> dict[str, float]:
        """How large tensors of a kind are: the largest gradient or value; for outputs a typical number of the modules'.

        The largest number of them may be the -1e9 of a mask or a count, beside which everything else is small.
        """

        def tensors(kind: str) -> list[torch.Tensor]:
            return [piece.local for piece in getattr(self.one, kind).values() if piece and is_rounded(piece.local)]

        largest = {kind: max(map(largest_of, tensors(kind)), default=0.0) for kind in ("values", "gradients")}
        typical = _median(torch.tensor([_median(x.abs().double()) for x in tensors("modules")]))
        return {**largest, "outputs": typical, "modules": typical}

    def held(self, kind: str, name: str) -> Parts | None:
        """A tensor as those ranks have it that have it at all; where a rank has no gradient, it is zero."""
        found = {rank: getattr(seen, kind)[name] for rank, seen in enumerate(self.ranks) if name in getattr(seen, kind)}
        if not any(found.values()):
            return None
        for rank in [rank for rank, piece in found.items() if piece is None]:
            value = self.ranks[rank].values[name]
            found[rank] = replace(value, local=torch.zeros_like(value.local))
        return Parts(self.mesh, found)

    def values(self) -> Iterator[Mismatch]:
        """Parameters that don't start out as on one device, or that another step has changed."""
        for name, whole in self.one.values.items():
            held, tolerance = self.held("values", name), self.tolerance("values", whole.local)
            if held is None:
                yield Mismatch("shape", "nowhere: no rank has a parameter of this name", name=name, what="value")
                continue
            self.layouts[name] = _fitting(held, whole, tolerance)
            if self.layouts[name]:
                continue
            found = diagnosed(held, whole.local, tolerance)
            first, begun = self.one.begun.get(name), self.held("begun", name)
            self.layouts[name] = _fitting(begun, first, tolerance) if first and begun else []
            if not self.layouts[name]:
                text = f"not the one device's ({found.text}): give both the same, by one seed or parts of one tensor"
                yield replace(found, text=text, name=name, what="value")
            elif not self._is_rounding(name):
                text = f"not the one device's ({found.text}); it began as that, so what stepped it isn't the same"
                yield replace(found, text=text, name=name, what="stepped")
        extra = {name: None for seen in self.ranks for name in seen.values if name not in self.one.values}
        for name in extra:
            yield Mismatch("shape", "of no parameter that one device has", name=name, what="value")

    def _is_rounding(self, name: str) -> bool:
        """Whether a parameter's gradient is zero but for rounding, so that Adam steps it by chance."""
        gradient = self.one.gradients.get(name)
        return (
            gradient is not None and largest_of(gradient.local) <= self.tolerance("gradients", gradient.local).absolute
        )

    def outputs(self) -> Iterator[Mismatch]:
        """Outputs that differ."""
        for name, whole in self.one.outputs.items():
            held, tolerance = self.held("outputs", name), self.tolerance("outputs", whole.local)
            if held is None:
                yield Mismatch("shape", "missing on every rank", name=name, what="output")
            elif not _fitting(held, whole, tolerance, orders=held.is_plain) and not held.is_share(
                whole.local, tolerance
            ):
                added = {each: piece.local for each, piece in self.one.values.items()}
                yield replace(diagnosed(held, whole.local, tolerance, added), name=name, what="output")
        for name in dict.fromkeys(name for seen in self.ranks for name in seen.outputs):
            if name not in self.one.outputs:
                yield Mismatch("shape", "there, though one device has none of this name", name=name, what="output")

    def gradients(self) -> Iterator[Mismatch]:
        """Gradients that differ, those of the parameters that are used last first."""
        order = {_module(name): i for i, name in enumerate(self.one.modules)}
        second = {name for tie in self.one.ties for name in tie[1:] if all(tie in seen.ties for seen in self.ranks)}
        names = [name for name in self.one.gradients if name not in second]
        for name in sorted(names, key=lambda name: order.get(name.rpartition(".")[0], -1), reverse=True):
            whole, held = self.one.gradients[name], self.held("gradients", name)
            if whole is None:
                if held is not None and any(bool(piece.local.any()) for piece in held.pieces.values()):
                    yield Mismatch("shape", "there, though on one device it has none", name=name, what="gradient")
                continue
            tolerance = self.tolerance("gradients", whole.local)
            if held is None:
                if largest_of(whole.local) > tolerance.absolute:
                    yield Mismatch("zero", "missing: no rank has one", factor=0.0, name=name, what="gradient")
                continue
            among = self.layouts.get(name) if held.is_plain else None  # a plain gradient lies as its parameter does
            if not held.fitting(whole.local, tolerance, among=among):
                found = diagnosed(held, whole.local, tolerance, among=among)
                yield replace(found, text=found.text + self._untied(name), name=name, what="gradient")
        for name in dict.fromkeys(name for seen in self.ranks for name in seen.gradients):
            if name in self.one.values and name not in self.one.gradients and self.held("gradients", name) is not None:
                text = "there, though on one device the parameter is frozen (it has requires_grad=False)"
                yield Mismatch("shape", text, name=name, what="gradient")

    def _untied(self, name: str) -> str:
        """A hint where one device ties a parameter to another one, and a rank that has both doesn't."""
        for tie in self.one.ties:
            others = [each for each in tie if each != name]
            apart = any(name in s.values and others[0] in s.values and tie not in s.ties for s in self.ranks)
            if name in tie and apart:
                return f"; on one device it is tied to {words(others)}, and here it isn't"
        return ""

    def every(self, gradients: Sequence[Mismatch], follow: bool) -> list[Mismatch]:
        """One line for all gradients, where all are the same multiple of the right ones.

        The loss is that multiple, unless they `follow` from outputs that are wrong otherwise.
        """
        pieces = [piece.local for piece in self.one.gradients.values() if piece is not None]
        nonzero = sum(largest_of(x) > self.tolerance("gradients", x).absolute for x in pieces)
        ties = sum(len(tie) - 1 for tie in self.one.ties)
        if len(gradients) < 2 or len(gradients) < nonzero - ties or any(each.kind != "factor" for each in gradients):
            return []
        first = gradients[0]
        if any(abs((each.factor or 0.0) / (first.factor or 1.0) - 1) > 1e-6 for each in gradients):
            return []
        text = f"all {len(gradients)} are {first.text}"
        name = "every gradient"
        return [replace(first, kind="factor" if follow else "every", text=text, name=name, what=name)]

    def modules(self) -> Iterator[Mismatch]:
        """The first module whose output is wrong, after random numbers that are drawn before it."""
        before: list[tuple[str, Mismatch]] = []  # what is pending, just before
        for name, whole in self.one.modules.items():
            held, tolerance = self.held("modules", name), self.tolerance("modules", whole.local)
            if held is None:
                continue
            if _fitting(held, whole, tolerance):
                before = []
                continue
            prefix = f"{_module(name)}." if _module(name) else ""
            added = {each: piece.local for each, piece in self.one.values.items() if each.startswith(prefix)}
            added |= {f"the output of {each}": self.one.modules[each].local for each, _ in before[-1:]}
            found = diagnosed(held, whole.local, tolerance, added)
            if found.kind == "pending" and found.factor is None:
                before.append((name, found))
                continue
            if found.kind == "shape":
                before = []
                continue
            if name in self.one.drawn:
                text = (
                    "random numbers, which axes.verify can't turn off as it does dropout; where another mesh draws "
                    "others, what follows can't be compared. Turn them off, as by module.eval()"
                )
                yield Mismatch("random", text, name=self.one.drawn[name], what="random")
            if (
                before
                and found.kind in (*_UNKNOWN, "summed")
                and set(before[-1][1].axes) <= set(held.differing(tolerance))
            ):
                yield self._missing(before, name)
            else:
                if found.kind in _UNKNOWN:
                    found = replace(found, text=found.text + self._placed(_module(name)))
                yield replace(found, name=self._title(name), what="module")
            return

    def _missing(self, before: Sequence[tuple[str, Mismatch]], wrong: str) -> Mismatch:
        """Pending values used as if they were whole; named is the innermost module whose output they are."""
        name, found = before[-1]
        for inner, _ in reversed(before):
            if _module(inner).startswith(_module(name)):
                name = inner
        after = f"{wrong or 'the model'} after it is wrong: an all-reduce over {words(found.axes)} is missing after it"
        return replace(found, kind="missing", text=f"{found.text}, and {after}", name=name, what="module")

    def _placed(self, module: str) -> str:
        """How the first split parameters in and beside a module lie: their rows may be in another order."""
        inside, beside = f"{module}." if module else "", f"{module.rpartition('.')[0]}." if "." in module else ""
        texts: list[str] = []
        for name, whole in self.one.values.items():
            held = self.held("values", name)
            if held is not None and name.startswith((inside, beside)) and len(texts) < 3:
                layouts = held.plain().fitting(whole.local, self.tolerance("values", whole.local))
                texts += [f"{name} '{layout.spec}'" for layout in layouts[:1] if layout.used]
        return f", with parameters sharded as {', '.join(texts)}" if texts else ""

    def dropout(self) -> Iterator[Mismatch]:
        """The first output that ranks have the same without dropout, and differently with it: of a module, or the
        program's own."""
        found = [("modules", "dropped", name, whole) for name, whole in self.one.modules.items()]
        found += [("outputs", "dropped_outputs", name, whole) for name, whole in self.one.outputs.items()]
        for kind, with_dropout, name, whole in found:
            held, dropped = self.held(kind, name), self.held(with_dropout, name)
            if held is None or dropped is None:
                continue
            tolerance = self.tolerance(kind, whole.local)
            layouts = held.fitting(whole.local, tolerance)
            split = {self.mesh.called(layout) for each in layouts[:1] for layout in each.used}
            same = set(held.axes) - set(held.differing(tolerance)) - split
            differs = tuple(axis for axis in dropped.differing(tolerance) if axis in same)
            if layouts and differs:
                over = words(differs)
                text = f"different between the ranks of {over}, where it should be the same: dropout draws differently"
                title = self._title(name) if kind == "modules" else name
                yield Mismatch("dropout", text, differs, name=title, what="module" if kind == "modules" else "output")
                return

    def _title(self, name: str) -> str:
        return f"{name or 'the model'} ({self.one.kinds.get(_module(name), 'module')})"


def _fitting(held: Parts, whole: Piece, tolerance: Tolerance, orders: bool = True) -> list[Sharding]:
    """The layouts in which a tensor is right, rows in another order only where there is none in the plain one."""
    return held.fitting(whole.local, tolerance) or (held.fitting(whole.local, tolerance, orders=True) if orders else [])


def _median(x: torch.Tensor) -> float:
    """The median of the numbers that are finite and not zero; 0 without any."""
    numbers = x[torch.isfinite(x) & (x != 0)]
    return float(numbers.median()) if numbers.numel() else 0.0


def _module(name: str) -> str:
    """The module of an output's name: `moe` of `moe[0] (call 2)`."""
    return name.partition("[")[0].partition(" ")[0]
