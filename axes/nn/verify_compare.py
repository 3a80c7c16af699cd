"""What differs between a program on several ranks and on one, from what they saw.

    differences = judged(Mesh("dp=2 tp=2"), seen_by_rank, seen_on_one, rtol=None, atol=None)

Values, outputs and gradients are judged alike: a tensor of one device, beside the same one as the ranks have it. Where
an output is wrong, the modules' outputs tell where it went wrong: the first of them that is neither the one device's,
nor split, nor pending. What is pending is right where a collective follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from axes import Mesh, Sharding
from axes.nn.verify_diagnosis import Mismatch, Parts, Tolerance, diagnosed, is_rounded, largest_of, words
from axes.nn.verify_run import Observed

_PRECISION = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""How far numbers of a dtype may be apart, relative to the largest of their tensor."""

_ROUNDING = 500
"""By how many units in the last place of the largest tensor of its kind a tensor may be off."""

_UNKNOWN = ("none", "differs", "shape")


def judged(
    mesh: Mesh, ranks: Sequence[Observed], one: Observed, rtol: float | None, atol: float | None
) -> list[Mismatch]:
    """What differs, with what to look at first at the front.

    `mesh`: a small mesh whose ranks saw `ranks`, in order. `rtol`, `atol`: None for tolerances that follow from dtypes.
    """
    world = _World(mesh, ranks, one, rtol, atol)
    values = list(world.wrong("values", "value"))
    begun = {each.name for each in values}
    stepped = [each for each in world.wrong("stepped", "stepped") if each.name not in begun]
    outputs = list(world.wrong("outputs", "output"))
    causes = [each for each in outputs if each.kind not in ("factor", "shape")]  # which make gradients wrong
    others = [each for each in outputs if each not in causes]
    gradients = [each for each in world.wrong("gradients", "gradient") if each.name not in begun]
    every = world.every(gradients)
    each = sorted(gradients, key=lambda each: each.kind in _UNKNOWN)
    modules = world.module() if outputs and not values else []
    return [*world.dropout(), *values, *modules, *causes, *every, *others, *([] if every else each), *stepped]


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
        dtype = min(x.dtype.to_real(), self.one.narrow, key=lambda dtype: dtype.itemsize)
        relative = max(_PRECISION[x.dtype.to_real()], _PRECISION.get(dtype, 3e-2)) if self.rtol is None else self.rtol
        rounding = min(_ROUNDING * torch.finfo(dtype).eps, relative) * self._scales[kind]
        return Tolerance(relative, rounding if self.atol is None else self.atol)

    @cached_property
    def _scales(self) -> dict[str, float]:
        """How large tensors of a kind are: the largest gradient or value; for outputs a typical number of the modules'.

        The largest number of them may be the -1e9 of a mask or a count, beside which everything else is small.
        """

        def tensors(kind: str) -> list[torch.Tensor]:
            return [piece.local for piece in getattr(self.one, kind).values() if piece and is_rounded(piece.local)]

        value, gradient = (max(map(largest_of, tensors(kind)), default=0.0) for kind in ("values", "gradients"))
        typical = _median(torch.tensor([_median(x.abs().double()) for x in tensors("modules")]))
        outputs = dict.fromkeys(("outputs", "modules", "kept", "dropped"), typical)
        return {"values": value, "stepped": value, "gradients": gradient, **outputs}

    def held(self, kind: str, name: str) -> Parts | None:
        """A tensor as those ranks have it that have it at all; where a rank has no gradient, it is zero."""
        found = {rank: getattr(seen, kind)[name] for rank, seen in enumerate(self.ranks) if name in getattr(seen, kind)}
        if not any(found.values()):
            return None
        for rank in [rank for rank, piece in found.items() if piece is None]:
            value = self.ranks[rank].values[name]
            found[rank] = replace(value, local=torch.zeros_like(value.local))
        return Parts(self.mesh, found)

    def wrong(self, kind: str, what: str) -> Iterator[Mismatch]:
        """The tensors of a kind that differ; of gradients those of the parameters that are used last come first."""
        order = {_module(name): i for i, name in enumerate(self.one.modules)}
        names = dict.fromkeys(name for seen in (self.one, *self.ranks) for name in getattr(seen, kind))
        last = sorted(names, key=lambda name: order.get(name.rpartition(".")[0], -1), reverse=True)
        for name in last if kind == "gradients" else names:
            whole, held = getattr(self.one, kind).get(name), self.held(kind, name)
            if whole is None or held is None:
                present = [] if whole is held else held.pieces.values() if held else [whole]
                if kind != "gradients" or any(not self._is_zero(piece.local) for piece in present):
                    text = "there, though one device has none" if held else "missing: no rank has one"
                    yield Mismatch("shape", text, name=name, what=what)
                continue
            found, wanted = held.first.local.dtype, whole.local.dtype
            if kind == "outputs" and found != wanted:
                yield Mismatch("shape", f"of {found} where it should be {wanted}", name=name, what=what)
            tolerance, among = self.tolerance(kind, whole.local), None
            if held.is_plain and kind in ("gradients", "stepped"):
                among = self.layouts.get(name)  # they lie as the parameter's value does
            fits = held.fitting(
                whole.local, tolerance, among, orders=kind == "values" or (kind == "outputs" and held.is_plain)
            )
            if kind == "values":
                self.layouts[name] = fits
            stepped_by_chance = kind == "stepped" and self._has_zero_gradient(name)
            if not fits and not stepped_by_chance and not (kind == "outputs" and held.is_share(whole.local, tolerance)):
                added = {each: piece.local for each, piece in self.one.values.items()} if kind == "outputs" else {}
                yield replace(diagnosed(held, whole.local, tolerance, added, among), name=name, what=what)

    def _is_zero(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient is zero but for rounding."""
        return largest_of(gradient) <= self.tolerance("gradients", gradient).absolute

    def _has_zero_gradient(self, name: str) -> bool:
        """Whether a parameter's gradient is zero but for rounding, by which Adam steps it as far as by any other."""
        gradient = self.one.gradients.get(name)
        return gradient is not None and self._is_zero(gradient.local)

    def every(self, gradients: Sequence[Mismatch]) -> list[Mismatch]:
        """One line for all gradients, where all are the same multiple of the right ones: the loss is that."""
        there = [piece for piece in self.one.gradients.values() if piece and not self._is_zero(piece.local)]
        first = gradients[0] if gradients else Mismatch("none", "")
        factors = [each.factor if each.kind == "factor" else None for each in gradients]
        alike = all(each and first.factor and math.isclose(each, first.factor, rel_tol=1e-6) for each in factors)
        if len(gradients) < max(2, len(there)) or not alike:
            return []
        name = "every gradient"
        return [replace(first, text=f"all {len(gradients)} are {first.text}", name=name, what=name)]

    def module(self) -> list[Mismatch]:
        """The first module whose output is wrong, or the one before it whose pending output was used as the whole."""
        before: list[tuple[str, Mismatch]] = []  # what is pending, just before
        for name, whole in self.one.modules.items():
            held, tolerance = self.held("modules", name), self.tolerance("modules", whole.local)
            if held is None:
                continue
            prefix = f"{_module(name)}." if _module(name) else ""
            added = {each: piece.local for each, piece in self.one.values.items() if each.startswith(prefix)}
            added |= {f"the output of {each}": self.one.modules[each].local for each, _ in before[-1:]}
            fits = held.fitting(whole.local, tolerance, orders=True)
            found = Mismatch("shape", "") if fits else diagnosed(held, whole.local, tolerance, added)
            if found.kind == "shape":
                before = []
            elif found.kind == "pending" and found.factor is None:
                before.append((name, found))
            elif before and found.kind in ("none", "differs", "summed"):
                last, pending = before[-1]
                inner = next(each for each, _ in before if _module(each).startswith(_module(last)))
                missing = f"an all-reduce over {words(pending.axes)} is missing between them"
                text = f"{pending.text}, and {name or 'the model'} after it is wrong: {missing}"
                return [replace(pending, kind="missing", text=text, name=inner, what="module")]
            else:
                return [replace(found, name=self._title(name), what="module")]
        return []

    def dropout(self) -> list[Mismatch]:
        """The first dropout of which ranks have the same input and drop other elements.

        A constant, as a mask is made of, is the same on ranks that have different parts.
        """
        for name, whole in self.one.kept.items():
            kept, dropped, tolerance = (
                self.held("kept", name),
                self.held("dropped", name),
                self.tolerance("kept", whole.local),
            )
            if kept is not None and dropped is not None and whole.local.unique().numel() > 1:
                axes = tuple(axis for axis in dropped.differing(tolerance) if axis not in kept.differing(tolerance))
                if axes:
                    text = f"drops other elements on each rank of {words(axes)}, though its input is the same there"
                    return [Mismatch("dropout", text, axes, name=self._title(name), what="dropout")]
        return []

    def _title(self, name: str) -> str:
        kind = self.one.kinds.get(_module(name))
        return f"{name or 'the model'} ({kind})" if kind else name


def _median(x: torch.Tensor) -> float:
    """The median of the numbers that are finite and not zero; 0 without any."""
    numbers = x[torch.isfinite(x) & (x != 0)]
    return float(numbers.median()) if numbers.numel() else 0.0


def _module(name: str) -> str:
    """The module of an output's name: `moe` of `moe[0] (call 2)`."""
    return name.partition("[")[0].partition(" ")[0]
