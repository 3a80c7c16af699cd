"""Optimizers as users write them: those whose steps work on shards, and those that need more than an element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Each(torch.optim.Optimizer):
    """Steps each parameter that has a gradient by `one`, after the closure."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any):
        super().__init__(params, {"lr": lr, **options})

    def one(self, p: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
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


# --- on shards as on the whole


class Lion(Each):
    """It makes its state anew at each step, and asks whether it is there; it takes every parameter to have a gradient."""

    def __init__(self, params: Any, lr: float = 0.1, whole: bool = False):
        super().__init__(params, lr, whole=whole)

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


class FreesGradients(Each):
    def one(self, p, g, group):
        super().one(p, g, group)
        p.grad = None


class ZeroesGradients(Each):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


class ReplacesGradients(Each):
    def one(self, p, g, group):
        super().one(p, g, group)
        p.grad = g / 2


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
        state = self.state[p]
        state["sum"] = state.get("sum", 0) + g
        p.sub_(state["sum"], alpha=group["lr"])


class ByItsLoss(Each):
    @torch.no_grad()
    def step(self, closure=None):
        scale = 1.0 if closure is None else float(closure())
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * scale)
        return {"scale": scale}


class Counts(Each):
    """A tensor of the options that steps count up."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr, count=torch.zeros(()))

    def one(self, p, g, group):
        group["count"].add_(1)
        p.sub_(g, alpha=group["lr"] / float(group["count"]))


class Constants(Each):
    """State that is the same on all shards, and may have the shape of one."""

    def one(self, p, g, group):
        betas = self.state[p].setdefault("betas", torch.tensor([0.5, 0.25]))
        p.sub_(g, alpha=float(betas[0] + betas[1]))


class ByDims(Each):
    """A value for each element of a matrix, and one for all of a vector, under the same name."""

    def one(self, p, g, group):
        v = self.state[p].setdefault("v", torch.zeros_like(g) if p.ndim > 1 else torch.zeros(()))
        v.add_(g.square() if p.ndim > 1 else 1)
        p.sub_(g / (v + 1), alpha=group["lr"])


class Late(Each):
    """State that is first made after more steps than anybody tries."""

    def one(self, p, g, group):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 9:
            state.setdefault("slow", torch.zeros_like(p)).add_(g)
            state.setdefault("number", torch.zeros(()))
        super().one(p, g, group)


class AsksOfParameters(Each):
    """Whether a parameter is trained, and attributes of it, which a step may also set."""

    def one(self, p, g, group):
        if p.requires_grad and isinstance(p, torch.nn.Parameter) is group["wants_parameters"]:
            super().one(p, g * getattr(p, "scale", 1.0), group)
            p.steps = getattr(p, "steps", 0) + 1

    def __init__(self, params, lr=0.1, wants_parameters=False):
        super().__init__(params, lr, wants_parameters=wants_parameters)


class ByGroup(Each):
    """A value for each element in the groups that say so, in others one for all, under the same name."""

    def __init__(self, params, lr=0.1, each=True):
        super().__init__(params, lr, each=each)

    def one(self, p, g, group):
        v = self.state[p].setdefault("v", torch.zeros_like(p) if group["each"] else torch.zeros(()))
        v.add_(g if group["each"] else 1)
        p.sub_(v * g, alpha=group["lr"])


ELEMENTWISE: list[type[Each]] = [
    Each, Lion, Forgets, FreesGradients, ZeroesGradients, ReplacesGradients, Marks, Twice, ByItsLoss, Counts, Constants,
    ByDims, Late, AsksOfParameters, ByGroup,
]  # fmt: skip


# --- not on shards


class Lamb(Each):
    """Scales by the norm of the parameter: a whole matrix, or a row of it."""

    dim: Any = None

    def one(self, p, g, group):
        norm = p.norm() if self.dim is None else p.norm(dim=self.dim, keepdim=True)
        p.sub_(g * norm, alpha=group["lr"])


class LambOfRows(Lamb):
    dim = -1


class LambOfColumns(Lamb):
    dim = 0


class LambOfVectors(Lamb):
    def one(self, p, g, group):
        (super() if p.ndim == 1 else super(Lamb, self)).one(p, g, group)


class Centralizes(Each):
    """Kernels of convolutions alone."""

    def one(self, p, g, group):
        super().one(p, g - g.mean((1, 2, 3), keepdim=True) if g.ndim == 4 else g, group)


class Factors(Each):
    """Matrices with enough rows and columns alone."""

    def one(self, p, g, group):
        if min(g.shape) >= 128:
            g = g * g.square().mean(1, keepdim=True)
        super().one(p, g, group)


class Clips(Each):
    def one(self, p, g, group):
        super().one(p, g * min(1.0, 100.0 / (float(g.norm()) + 1e-6)), group)


class SkipsInfinities(Each):
    def one(self, p, g, group):
        if g.isfinite().all():
            super().one(p, g, group)


class SkipsZeros(Each):
    """With a momentum, which moves a parameter that has a gradient of zero."""

    def skips(self, g):
        return not g.any()

    def one(self, p, g, group):
        if not self.skips(g):
            self.state[p]["m"] = 0.5 * self.state[p].get("m", 0) + g
            super().one(p, self.state[p]["m"], group)


class DecaysTrained(Each):
    """Shrinks what has a gradient that isn't zero."""

    def one(self, p, g, group):
        if g.any():
            super().one(p, g + 0.1 * p, group)


class SkipsNan(SkipsZeros):
    def skips(self, g):
        return bool(g.isnan().any())


class DecaysMatrices(Each):
    """What has a dim of size 1 isn't a matrix to it."""

    def one(self, p, g, group):
        super().one(p, g if 1 in p.shape else g + p, group)


class NormalizesDoubles(Each):
    def one(self, p, g, group):
        super().one(p, g / g.norm() if p.dtype == torch.float64 else g, group)


class NormalizesLater(Each):
    def one(self, p, g, group):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        super().one(p, g / g.norm() if state["step"] > 4 else g, group)


class ListsInState(Each):
    def one(self, p, g, group):
        self.state[p].setdefault("list", []).append(g.clone())
        super().one(p, g, group)


class BuffersInGroups(Each):
    def one(self, p, g, group):
        group.setdefault("buffers", {})[id(p)] = g.clone()
        super().one(p, g, group)


class NormalizesOnDemand(Each):
    """What an option says that may be set later."""

    def __init__(self, params, lr=0.1, norm=False, scale=0.0):
        super().__init__(params, lr, norm=norm, scale=scale)

    def one(self, p, g, group):
        factor = p.norm() if group["norm"] else 1 + group["scale"] * p.norm()
        super().one(p, g * factor, group)


class KeepsParameters(Each):
    """Parameters, their ids or tensors like them in an attribute."""

    keeps: Callable[[list[torch.Tensor]], Any] = staticmethod(lambda params: params)

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.own = self.keeps([p for group in self.param_groups for p in group["params"]])


class KeepsFactors(KeepsParameters):
    keeps = staticmethod(lambda params: dict.fromkeys(params, 0.5))


class KeepsIds(KeepsParameters):
    keeps = staticmethod(lambda params: {id(p): 0.5 for p in params})


class KeepsBuffers(KeepsParameters):
    keeps = staticmethod(lambda params: {"buffers": [torch.zeros_like(p) for p in params]})


class Wraps(Each):
    """Has another optimizer do it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.own = torch.optim.SGD(self.param_groups, lr=lr)


class Everywhere(Lion):
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1


class LateLists(Late):
    """State of shards that is first made after more steps than anybody tries, and that has another shape."""

    what: Callable[[torch.Tensor], Any] = staticmethod(lambda g: [g.clone()])

    def one(self, p, g, group):
        super().one(p, g, group)
        if self.state[p]["step"] > 9:
            self.state[p]["strange"] = self.what(g)


class LateStacks(LateLists):
    what = staticmethod(lambda g: torch.stack([g, g]))


class LateFlat(LateLists):
    what = staticmethod(lambda g: {"a": g.clone().flatten()})
