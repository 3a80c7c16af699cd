"""Optimizers as users write them: those whose steps work on shards, and those that need more than an element."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Each(torch.optim.Optimizer):
    """Steps each parameter that has a gradient by `one`, after the closure."""

    more: dict[str, Any] = {}  # noqa: RUF012 - options with their defaults

    def __init__(self, params: Any, lr: float = 0.1, **options: Any):
        super().__init__(params, {"lr": lr, **copy.deepcopy(self.more), **options})

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"])

    def all_of_them(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.all_of_them()
        return loss


Instead = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], Tensor | None]
"""A parameter, its gradient, its state and its group: what is subtracted in place of the gradient, None for nothing."""


def by(name: str, instead: Instead, **more: Any) -> type[Each]:
    """An optimizer of this name with these options."""

    def one(self: Each, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        step = instead(p, g, self.state[p], group)
        if step is not None:
            p.sub_(step, alpha=group["lr"])

    return type(name, (Each,), {"one": one, "more": more, "__module__": __name__})


# --- on shards as on the whole


class Lion(Each):
    """It makes its state anew at each step, and asks whether it is there; it takes every parameter to have a gradient."""

    more = {"whole": False}  # noqa: RUF012

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p] = {"m": torch.zeros_like(p), "count": 0}
                state = self.state[p]
                p.sub_(torch.sign(state["m"] * 0.9 + p.grad * 0.1), alpha=group["lr"])
                scale = p.abs().max() if group["whole"] else 1.0
                self.state[p] = {"m": state["m"] * 0.5 + p.grad * scale, "count": state["count"] + 1}


class Forgets(Each):
    """Removes a value of its state at each second step, and all of it at each third."""

    def one(self, p, g, group):
        state = self.state[p]
        turn = state.get("turn", 0) + 1
        state.update(turn=turn, sum=state.get("sum", 0) + g)
        p.sub_(state["sum"], alpha=group["lr"])
        if turn == 2:
            del state["sum"]
        if turn == 3:
            del self.state[p]


class Marks(Each):
    """State that is an empty dict says that a parameter was there before."""

    def one(self, p, g, group):
        if p not in self.state:
            self.state[p] = {}
            p.mul_(2)
        super().one(p, g, group)


class Twice(Each):
    """Asks for the gradients again in the middle of a step, which has state already."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        return super().step(closure)

    def one(self, p, g, group):
        self.state[p]["sum"] = self.state[p].get("sum", 0) + g
        p.sub_(self.state[p]["sum"], alpha=group["lr"])


class ByItsLoss(Each):
    @torch.no_grad()
    def step(self, closure=None):
        scale = 1.0 if closure is None else float(closure())
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * scale)
        return {"scale": scale}


class Late(Each):
    """State that is first made after more steps than anybody tries."""

    strange: Callable[[Tensor], Any] | None = None

    def one(self, p, g, group):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 9:
            state.setdefault("slow", torch.zeros_like(p)).add_(g)
            state.setdefault("number", torch.zeros(()))
            if self.strange is not None:
                state["strange"] = self.strange(g)
        super().one(p, g, group)


class AsksOfParameters(Each):
    """Whether a parameter is trained, and attributes of it, which a step may also set."""

    more = {"wants_parameters": False}  # noqa: RUF012

    def one(self, p, g, group):
        if p.requires_grad and isinstance(p, torch.nn.Parameter) is group["wants_parameters"]:
            super().one(p, g * getattr(p, "scale", 1.0), group)
            p.steps = getattr(p, "steps", 0) + 1


ELEMENTWISE: list[type[Each]] = [
    Each, Lion, Forgets, Marks, Twice, ByItsLoss, Late, AsksOfParameters,
    by("FreesGradients", lambda p, g, *_: setattr(p, "grad", None) or g),
    by("ReplacesGradients", lambda p, g, *_: setattr(p, "grad", g / 2) or g),
    # A tensor of the options that steps count up; state that is the same on all shards, and may have the shape of one;
    # a value for each element of a matrix, and one for all of a vector, under the same name; so in groups that say it.
    by("Counts", lambda p, g, state, group: g / float(group["count"].add_(1)), count=torch.zeros(())),
    by("Constants", lambda p, g, state, _: g * state.setdefault("betas", torch.tensor([0.5, 0.25])).sum()),
    by("ByDims", lambda p, g, state, _: g / (state.setdefault("v", torch.zeros_like(g) if p.ndim > 1 else torch.zeros(()))
                                             .add_(g.square() if p.ndim > 1 else 1) + 1)),
    by("ByGroup", lambda p, g, state, group: g * state.setdefault("v", torch.zeros_like(p) if group["each"] else torch.zeros(()))
                                                 .add_(g if group["each"] else 1), each=True),
]  # fmt: skip


# --- not on shards

LambOfVectors = by("LambOfVectors", lambda p, g, *_: g * p.norm() if p.ndim == 1 else g)
Centralizes = by("Centralizes", lambda p, g, *_: g - g.mean((1, 2, 3), keepdim=True) if g.ndim == 4 else g)
NormalizesDoubles = by("NormalizesDoubles", lambda p, g, *_: g / g.norm() if p.dtype == torch.float64 else g)
NormalizesOnDemand = by(
    "NormalizesOnDemand",
    lambda p, g, _, group: g * (p.norm() if group["norm"] else 1 + group["scale"] * p.norm()),
    norm=False,
    scale=0.0,
)


def of_steps(state: dict[str, Any]) -> int:
    """How many steps there were, this one among them."""
    state["step"] = state.get("step", 0) + 1
    return state["step"]


REFUSED: dict[type[Each], str] = {
    by("Lamb", lambda p, g, *_: g * p.norm()): "two halves of a",
    by("LambOfRows", lambda p, g, *_: g * p.norm(dim=-1, keepdim=True)): "two halves of a",
    by("LambOfColumns", lambda p, g, *_: g * p.norm(dim=0, keepdim=True)): "two halves of a",
    LambOfVectors: "two halves of a vector",
    Centralizes: "two halves of a tensor of 4 dims",
    by("Factors", lambda p, g, *_: g * g.square().mean(1, keepdim=True) if min(g.shape) >= 128 else g): "halves of a matrix",
    by("Clips", lambda p, g, *_: g * min(1.0, 100.0 / (float(g.norm()) + 1e-6))): "two halves of a",
    by("SkipsInfinities", lambda p, g, *_: g if g.isfinite().all() else None): "two halves of a",
    by("SkipsNan", lambda p, g, *_: None if g.isnan().any() else g): "two halves of a",
    by("SkipsZeros", lambda p, g, state, _: (state.update(m=0.5 * state.get("m", 0) + g) or state["m"]) if g.any() else None): "its state 'm'",
    by("DecaysTrained", lambda p, g, *_: g + 0.1 * p if g.any() else None): "two halves of a",
    by("DecaysMatrices", lambda p, g, *_: g if 1 in p.shape else g + p): "two halves of a matrix",
    by("NormalizesLater", lambda p, g, state, _: g / g.norm() if of_steps(state) > 4 else g): "two halves of a",
    by("ListsInState", lambda p, g, state, _: state.setdefault("list", []).append(g.clone()) or g): "its state 'list' isn't one value for each element",
    by("BuffersInGroups", lambda p, g, _, group: group.setdefault("buffers", {}).update({id(p): g.clone()}) or g): "it keeps tensors among the options of a group",
}  # fmt: skip
"""With the reason."""


class Everywhere(Lion):
    """Has state of no parameter."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1


class Keeps(Each):
    """Keeps something of its parameters in an attribute."""

    keeps: Callable[[list[Tensor]], Any] = staticmethod(lambda params: params)

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.own = self.keeps([p for group in self.param_groups for p in group["params"]])
