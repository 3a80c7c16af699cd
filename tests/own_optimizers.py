"""Optimizers as users write them, whose steps work on shards as on the whole."""

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


class ByItsLoss(Each):
    @torch.no_grad()
    def step(self, closure=None):
        scale = 1.0 if closure is None else float(closure())
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * scale)
        return {"scale": scale}


class Late(Each):
    """State that is first made after some steps."""

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


ELEMENTWISE: list[type[Each]] = [
    Each, Lion, Forgets, Marks, ByItsLoss, Late,
    by("FreesGradients", lambda p, g, *_: setattr(p, "grad", None) or g),
    by("ReplacesGradients", lambda p, g, *_: setattr(p, "grad", g / 2) or g),
    # A tensor of the options that steps count up; a value for each element of a matrix, and one for all of a vector, under
    # the same name; so in groups that say it.
    by("Counts", lambda p, g, state, group: g / float(group["count"].add_(1)), count=torch.zeros(())),
    by("ByDims", lambda p, g, state, _: g / (state.setdefault("v", torch.zeros_like(g) if p.ndim > 1 else torch.zeros(()))
                                             .add_(g.square() if p.ndim > 1 else 1) + 1)),
    by("ByGroup", lambda p, g, state, group: g * state.setdefault("v", torch.zeros_like(p) if group["each"] else torch.zeros(()))
                                                 .add_(g if group["each"] else 1), each=True),
]  # fmt: skip


# --- not on shards


class Everywhere(Lion):
    """Has state of no parameter."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
