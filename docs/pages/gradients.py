"""The page "Gradients": the table of what goes back for what went forward, each row run by four ranks.

Whole numbers in float64 add up exactly in any order, so a gradient that is right is off by 0.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import einops
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

import axes
from axes.algebra.expressions.transpose import cotangent
from axes.algebra.mesh import Mesh
from docs.pages.page import WRITTEN, Session, inline, paragraph, table

EXTENTS = {"b": 4, "s": 8, "d": 12, "f": 16}
"""Whole sizes of the tensors that are run."""


@dataclass(frozen=True)
class Expression:
    """An operation in one of the two views, and how the gradient of its result arrives (global view).

    before, after: local expressions around it, where what is between is `same`.
    """

    view: str
    text: str
    kind: str = "rearrange"
    op: str = "sum"
    arrives: str = ""
    before: str = ""
    after: str = ""

    @property
    def operands(self) -> tuple[str, ...]:
        """The specs of the operands."""
        return replace(self, text=self.before).operands_alone if self.before else self.operands_alone

    @property
    def operands_alone(self) -> tuple[str, ...]:
        """The specs of the operands of its own text."""
        return tuple(part.strip() for part in self.text.split("->")[0].split(","))

    def __call__(self, tensors: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
        """The operation, on DTensors or shards."""
        return getattr(axes, self.kind)(*tensors, self.text, *self.how, mesh=mesh)

    def on_one_device(self, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same by einops on whole tensors: the text without what stands after an `@` or a `|`."""
        text = re.sub(r"\|[^,>]*?(?=,|->|$)|@\([^)]*\)|@\w+", "", self.text)
        return getattr(einops, self.kind)(*wholes, text, *self.how)

    @property
    def how(self) -> tuple[str, ...]:
        """What a reduction takes beside its text."""
        return (self.op,) if self.kind == "reduce" else ()


def both(text: str, *arrives: str, kind: str = "rearrange", op: str = "sum") -> tuple[Expression, ...]:
    """One expression in both views."""
    local = Expression("local", text, kind, op)
    return local, *(replace(local, view="global", arrives=way) for way in arrives)


@dataclass(frozen=True)
class Ran:
    """What happened: the collectives forward and backward, the gradients' shardings, how far they are off."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]
    gradients: tuple[str, ...]
    off: float


COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "wait_tensor": "",
    "_wrap_tensor_autograd": "",
}
"""What torch's operators are called here; one that isn't listed has its own name."""


class Sent(TorchDispatchMode):
    """The collectives that run while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first what it does to its local tensors
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            kind = COLLECTIVES.get(name, name)
            self.kinds += [kind] if kind else []
        return func(*args, **(kwargs or {}))


# what every rank does


def run_everything() -> list[Ran]:
    """Every expression of the page, on this rank, in order."""
    torch.set_num_threads(1)
    runners: dict[str, Callable[..., Ran]] = {
        "local": run_local,
        "global": run_global,
        "region": run_region,
        "crossing": run_crossing,
    }
    found = []
    for row in ROWS:
        for run in row.runs:
            mesh = axes.init_mesh(declaration_of(run.text), device_type="cpu")
            found.append(runners[run.view](run, mesh))
    return found


def declaration_of(text: str) -> str:
    """The mesh that an expression is run on."""
    return "cp=2 tp=2" if "cp" in text else "tp=4"


def run_global(e: Expression, mesh: Mesh) -> Ran:
    """DTensors: the gradient arrives as it is said to, and is resolved to the leaf's own sharding."""
    wholes, leaves = _operands(e, mesh)
    raw: dict[int, str] = {}
    for at, leaf in enumerate(leaves):
        leaf.register_hook(functools.partial(_note, raw, at, e.operands[at]))
    with Sent() as there:
        y = e(leaves, mesh)
    cotangent = numbers(y.shape, 99)
    arriving = placed(cotangent, e.arrives, mesh)
    with Sent() as back:
        y.backward(arriving)
    off = _off(e, wholes, leaves, y, cotangent)
    return Ran(tuple(there.kinds), tuple(back.kinds), tuple(raw[at] for at in range(len(leaves))), off)


def _note(raw: dict[int, str], at: int, operand: str, found: torch.Tensor) -> None:
    """Keeps how a gradient came to the leaf."""
    names = iter(_dims(operand))
    raw[at] = re.sub(r"\b_\b", lambda _: next(names), axes.spec_of(found))


def run_local(e: Expression, mesh: Mesh) -> Ran:
    """Plain tensors: taken out of DTensors and put back into one, between which the gradient is single-device's."""
    wholes, leaves = _operands(e, mesh)
    shards = [axes.to_local(leaf, grad="summed") for leaf in leaves]
    if e.before:
        shards = [axes.rearrange(*shards, e.before, mesh=mesh)]
    plain = [shard.detach().requires_grad_() for shard in shards]
    with Sent() as there:
        alone = e(plain, mesh)
    with Sent() as back:
        alone.backward(torch.ones_like(alone))
    y = e(shards, mesh)
    if e.after:
        y = axes.rearrange(y, e.after, mesh=mesh)
    result = (e.after or e.text).split("->")[1].strip()
    y = axes.from_local(y, result, mesh=mesh, grad="summed")
    cotangent = numbers(y.shape, 99)
    y.backward(placed(cotangent, result.split("|")[0], mesh))
    return Ran(tuple(there.kinds), tuple(back.kinds), (), _off(e, wholes, leaves, y, cotangent))


def _operands(e: Expression, mesh: Mesh) -> tuple[list[torch.Tensor], list[DTensor]]:
    """Each operand whole, and sharded; both leaves that want a gradient, without hooks as yet."""
    wholes = [numbers([EXTENTS[name] for name in _dims(spec)], at) for at, spec in enumerate(e.operands)]
    leaves = [placed(whole, spec, mesh) for whole, spec in zip(wholes, e.operands, strict=True)]
    return [whole.requires_grad_() for whole in wholes], [leaf.detach().requires_grad_() for leaf in leaves]


def _dims(spec: str) -> list[str]:
    return [word.split("@")[0] for word in re.sub(r"@\([^)]*\)", "@", spec).split("|")[0].split()]


def numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Small whole numbers, the same on every rank, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, tuple(shape), generator=generator).double()


def placed(whole: torch.Tensor, spec: str, mesh: Mesh) -> DTensor:
    """The tensor in a sharding, with summands of their own on every rank where it is pending."""
    sharding = mesh.sharding(spec)
    if not sharding.pending:
        return axes.shard(whole.detach(), spec, mesh=mesh)
    ops = {op for op, _ in sharding.pending}
    noise = [numbers(whole.shape, 1000 + rank) for rank in range(mesh.size)]
    if mesh.rank == 0:
        count = mesh.size if ops == {"mean"} else 1
        local = count * whole.detach() - sum(noise[1:])
    else:
        local = noise[mesh.rank]
    return axes.from_local(local, spec, mesh=mesh)


def _off(
    e: Expression, wholes: Sequence[torch.Tensor], leaves: Sequence[DTensor], y: DTensor, cotangent: torch.Tensor
) -> float:
    """How far the value and the gradients are from those of one device, at most."""
    expected = e.on_one_device(wholes)
    expected.backward(cotangent)
    pairs = [(axes.unshard(y.detach()), expected.detach())]
    pairs += [(axes.unshard(leaf.grad), whole.grad) for leaf, whole in zip(leaves, wholes, strict=True)]
    return max((found - wanted).abs().max().item() for found, wanted in pairs)


@dataclass(frozen=True)
class Region:
    """A function on plain tensors between DTensors. `call` is its code, `whole` the same on one device."""

    text: str
    arrives: str
    call: str = "x"
    whole: str = "x"
    view: str = "region"

    @property
    def operands(self) -> tuple[str, ...]:
        """The specs of the operands."""
        return (re.sub(r"\| same@\w+", "", self.text.split("->")[0]).strip(),)

    def on_one_device(self, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        """The function on the whole tensor."""
        return eval(self.whole, {"x": wholes[0] * 1})


def run_region(e: Region, mesh: Mesh) -> Ran:
    """A region, and what the gradient of its result is inside."""
    wholes, (leaf,) = _operands(e, mesh)
    raw: dict[int, str] = {}
    inside: list[torch.Tensor] = []
    leaf.register_hook(functools.partial(_note, raw, 0, e.operands[0]))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = eval(e.call, {"axes": axes, "x": x * 1})
        y.register_hook(inside.append)
        return y

    with Sent() as there:
        y = axes.shard_map(function, e.text, mesh=mesh)(leaf)
    cotangent = numbers(y.shape, 99)
    arriving = placed(cotangent, e.arrives, mesh)
    with Sent() as back:
        y.backward(arriving)
    off = _off(e, wholes, [leaf], y, cotangent)
    described = _described(inside[0], cotangent, arriving, e, mesh)
    return Ran(tuple(there.kinds), tuple(back.kinds), (described, raw[0]), off)


def _described(found: torch.Tensor, whole: torch.Tensor, arriving: DTensor, e: Region, mesh: Mesh) -> str:
    """What a rank's gradient of the result is, of the gradient of the whole; an error where it is nothing known."""
    result = e.text.split("->")[1].split("|")[0]
    part = axes.to_local(axes.shard(whole, result, mesh=mesh))
    name = "its part of G" if "@" in result else "G"
    here = axes.sharding_of(arriving).local_indices(whole.shape)
    padded = torch.zeros_like(whole)
    padded[here] = whole[here]
    known = {
        name: part,
        f"{name} / {mesh.size}": part / mesh.size,
        "its term of G": arriving.to_local(),
        "its part of G, padded with zeros": padded,
    }
    for text, value in known.items():
        if torch.equal(value, found):
            return text
    raise AssertionError(f"the gradient inside '{e.text}' is none of {', '.join(known)}")


@dataclass(frozen=True)
class Crossing:
    """A tensor that crosses the border alone, replicated over tp.

    `call` is code that takes the DTensor `w` out, or the plain tensor `y` in. Plain code uses its copies
    `alike` on every rank, or each rank in its `own` way: which of the two gradients are right with this call.
    """

    call: str
    alike: bool
    own: bool
    view: str = "crossing"

    @property
    def text(self) -> str:
        """What it is called in tests."""
        return self.call


def run_crossing(e: Crossing, mesh: Mesh) -> Ran:
    """What gradients a call gives plain code that uses its copies alike, and each in its own way."""
    ways = [_crossed(e, mesh, is_own) for is_own in (False, True)]
    off = max(
        0.0 if text == "right" or not right else 1.0 for (_, text), right in zip(ways, (e.alike, e.own), strict=True)
    )
    (alike, _), (own, _) = ways
    return Ran(alike, own, tuple(text for _, text in ways), off)


def _crossed(e: Crossing, mesh: Mesh, is_own: bool) -> tuple[tuple[str, ...], str]:
    """The collectives of backward, and what the gradient is."""
    whole = numbers([12], 1).requires_grad_()
    shares = numbers([mesh.size, 12], 2)
    share = shares[mesh.rank] if is_own else torch.ones(())
    leaves = re.search(r"\bw\b", e.call) is not None
    space = {"axes": axes, "DTensor": DTensor, "Replicate": Replicate, "Partial": Partial, "mesh": mesh}
    if leaves:
        leaf = axes.shard(whole.detach(), "d", mesh=mesh).requires_grad_()
        loss = (share * eval(e.call, {**space, "w": leaf}) ** 2).sum()
        (shares.sum(0) * whole**2 if is_own else whole**2).sum().backward()
    else:
        leaf = whole.detach().clone().requires_grad_()
        y = axes.psum(share * leaf, "tp", mesh=mesh) if is_own else leaf * 1
        loss = (eval(e.call, {**space, "y": y}) ** 2).sum()
        ((shares.sum(0) * whole if is_own else whole) ** 2).sum().backward()
    with Sent() as back:
        loss.backward()
    found = leaf.grad.to_local() if leaves else axes.psum(leaf.grad, "tp", mesh=mesh) if is_own else leaf.grad
    return tuple(back.kinds), _compared(found, whole.grad, 2 * share * whole.detach() if leaves else None, mesh.size)


def _compared(found: torch.Tensor, wanted: torch.Tensor, summand: torch.Tensor | None, size: int) -> str:
    """What a gradient is of the right one; an error where it is nothing known."""
    known = {"right": wanted, f"{size} times too large": wanted * size, f"1/{size} of it": wanted / size}
    for text, value in {**known, "only this rank's term": summand}.items():
        if value is not None and torch.equal(value, found):
            return text
    raise AssertionError(f"{found} is none of {known}, {summand}")


# the table


@dataclass(frozen=True)
class Row:
    """A row of the table of gradients, and what is run of it."""

    title: str
    why: str
    runs: tuple[Expression | Region | Crossing, ...]


P, R, S = "b s d | sum@tp", "b s d", "b s@tp d"

ROWS = (
    Row(
        "S -> R",
        "In the local view the gradient of an all-gather is a reduce-scatter: every rank has one term of the "
        "whole gradient, and needs its own part of the sum. In the global view the collective depends on the "
        "sharding in which the gradient arrives.",
        both("b s@tp d -> b s d", P, R, S, "b s d@tp"),
    ),
    Row(
        "R -> S",
        "A slice needs no communication, forward or backward. In the local view each rank pads its part of the "
        "gradient with zeros, and the result is pending. In the global view the gradient of the slice "
        "stays split. If the tensor is a leaf, an all-gather then brings the gradient to the sharding of the leaf.",
        both("b s d -> b s@tp d", S, R),
    ),
    Row(
        "P -> R",
        "In the local view the gradient of an all-reduce is an all-reduce, because the loss of every rank "
        "contains the sum. In the global view there is one loss, so each term of the sum has the same gradient "
        "as the sum.",
        both("b s d | sum@tp -> b s d", R, P, S),
    ),
    Row(
        "P -> S",
        "The gradient of a reduce-scatter is an all-gather.",
        both("b s d | sum@tp -> b s@tp d", S, R, P),
    ),
    Row(
        "S -> S', permutation",
        "The gradient of an exchange is the inverse exchange.",
        both("b s@tp d -> b s d@tp", "b s d@tp", R, P)
        + both("b s@(cp tp) d -> b s@(tp cp) d", "b s@(tp cp) d", "b s d", "b s@(cp tp) d"),
    ),
    Row(
        "P -> I; I -> R; R -> I",
        "I is `same`: every rank has the same value and the same, whole gradient. Activations between the blocks "
        "of a tensor-parallel model are an example. The first two rows are Megatron's g and f. DTensors don't "
        "need `same`, because their gradients know their own sharding.",
        (
            Expression("local", "b s d | sum@tp -> b s d | same@tp", after="b s d | same@tp -> b s d"),
            Expression("local", "b s d | same@tp -> b s d", before="b s d -> b s d | same@tp"),
            Expression("local", "b s d -> b s d | same@tp", after="b s d | same@tp -> b s d"),
        ),
    ),
    Row(
        "S -> I; I -> S",
        "Between split and `same`, no gradient has to be summed. The gradient of a gather is a slice, and the "
        "gradient of a slice is a gather.",
        (
            Expression("local", "b s@tp d -> b s d | same@tp", after="b s d | same@tp -> b s d"),
            Expression("local", "b s d | same@tp -> b s@tp d", before="b s d -> b s d | same@tp"),
        ),
    ),
    Row(
        "mean -> R",
        "The collectives are those of P -> R. The value is divided by the number of ranks. In the local view the "
        "gradient is divided, too. In the global view a tensor with a pending mean has the same value as the finished "
        "mean. So its gradient isn't divided.",
        both("b s d | mean@tp -> b s d", R, P, S),
    ),
    Row(
        "max -> R",
        "As in `torch.amax`, the gradient is divided equally among the elements that are equal to the maximum. In "
        "both views the gradient is computed on shards, and each rank has one term of the result's gradient. So the "
        "backward pass has two all-reduces: one adds up the terms, the other counts the elements that are equal to "
        "the maximum.",
        both("b s@tp d -> b d", "b d", "b d | sum@tp", "b d@tp", kind="reduce", op="max"),
    ),
    Row(
        "einsum operand: R; S; P",
        "Choose one operand and one axis. If the axis splits only the other operand, the gradient of the chosen "
        "operand is pending over the axis. If the axis splits the chosen operand, its gradient is split too. If the "
        "chosen operand is pending over the axis, its gradient is replicated.",
        both("b s d, d f@tp -> b s f@tp", "b s f@tp", "b s f", kind="einsum")
        + both("b s f@tp, f@tp d -> b s@tp d", "b s@tp d", "b s d", kind="einsum")
        + both("b d | sum@tp, d f -> b f | sum@tp", "b f", "b f | sum@tp", kind="einsum"),
    ),
    Row(
        "reduce over a split dim: pending; carried out",
        "The gradient of a sum is copied to all elements that were summed. If the sum stays pending, each rank has "
        "the whole gradient of the sum and copies it. (In the global view, a pending gradient is reduced first.) If "
        "the sum is carried out, then in the local view the gradients of all ranks are summed first.",
        both("b s@tp d -> b d | sum@tp", "b d", "b d | sum@tp", kind="reduce")
        + both("b s@tp d -> b d", "b d", "b d | sum@tp", kind="reduce"),
    ),
    Row(
        "ppermute; all_gather; psum_scatter; all_to_all",
        "These are collectives by name, called in a region on plain tensors. G is the gradient of the whole result. "
        'The column "inside" shows the gradient of the result that a rank gets inside the region.',
        (
            Region("b s@tp d -> b s@tp d", S, 'axes.ppermute(x, "tp", shift=1)', "x.roll(x.shape[1] // 4, 1)"),
            Region("b s@tp d -> b s d", R, 'axes.all_gather(x, "tp", dim=1)'),
            Region("b s d | sum@tp -> b s@tp d", S, 'axes.psum_scatter(x, "tp", dim=1)'),
            Region("b s@tp d -> b s d@tp", "b s d@tp", 'axes.all_to_all(x, "tp", split_dim=2, concat_dim=1)'),
        ),
    ),
    Row(
        "regions: between the views",
        "`axes.shard_map` turns its operands from DTensors into plain tensors, and its results back into DTensors. If "
        "a result is replicated, each rank gets one term of its gradient inside the region. If an operand is "
        "replicated, its gradient is pending outside the region. If the spec of a result has `same`, each rank gets "
        "the whole gradient of this result inside the region. If the spec of an operand has `same`, the backward pass "
        "of the function must compute the whole gradient of this operand on each rank. A region may use a plain "
        "tensor that isn't an argument only if that tensor needs no gradient.",
        (
            Region("b s@tp d -> b s@tp d", S),
            Region("b s@tp d -> b s@tp d", R),
            Region("b s@tp d -> b s@tp d", P),
            Region("b s d -> b s d", R),
            Region("b s d -> b s d", P),
            Region("b s d -> b s d", S),
            Region("b s d | sum@tp -> b s d | sum@tp", R),
            Region("b s d | mean@tp -> b s d | mean@tp", R),
            Region("b s d | same@tp -> b s d | same@tp", R),
            Region("b s d | same@tp -> b s d | same@tp", P),
            Region("b s d | same@tp -> b s d | same@tp", S),
        ),
    ),
    Row(
        "to_local, from_local, shard, unshard: between the views",
        "These functions convert a single tensor, and don't know how plain code uses its copies on the ranks. For the "
        "gradient of a replicated tensor this matters. If every rank uses its copy in the same way (*same use*), each "
        "rank has the whole gradient. If each rank uses its copy differently (*different use*), such as with its own "
        "rows of the batch, each rank has one term of the gradient. `axes.shard` and `axes.unshard` assume that every "
        "rank uses its copy in the same way. `axes.to_local` and "
        '`axes.from_local` need `grad="whole"` for the same use or `grad="summed"` for different use, and raise an '
        'error without `grad=`. `| same@tp` in the spec means `"whole"` for the axis `tp` only. '
        "torch's own functions assume the same use, unless `grad_placements` has `Partial()`.",
        (
            Crossing("axes.unshard(w)", alike=True, own=False),
            Crossing('axes.to_local(w, grad="whole")', alike=True, own=False),
            Crossing('axes.to_local(w, "d | same@tp")', alike=True, own=False),
            Crossing('axes.to_local(w, grad="summed")', alike=False, own=True),
            Crossing("w.to_local()", alike=True, own=False),
            Crossing("w.to_local(grad_placements=[Replicate()])", alike=True, own=False),
            Crossing("w.to_local(grad_placements=[Partial()])", alike=False, own=True),
            Crossing('axes.shard(y, "d", mesh=mesh)', alike=True, own=False),
            Crossing('axes.from_local(y, "d", mesh=mesh, grad="whole")', alike=True, own=False),
            Crossing('axes.from_local(y, "d | same@tp", mesh=mesh)', alike=True, own=False),
            Crossing('axes.from_local(y, "d", mesh=mesh, grad="summed")', alike=False, own=True),
            Crossing("DTensor.from_local(y, mesh.device_mesh, [Replicate()])", alike=True, own=False),
        ),
    ),
)


CLOSING = """
## Autocast, forward mode and torch.func

Under `torch.autocast`, `axes.einsum` casts its operands to the dtype of autocast, except float64. Reductions keep the
dtype of their tensor. A gradient has the dtype of its operand. `backward()` may be called inside or outside of the
`with` block.

```python
import axes, torch
with axes.simulate(4), axes.init_mesh("tp=4", device_type="cpu"):
    x, w = axes.ones("b k@tp", b=8, k=4), axes.ones("k@tp f", k=4, f=6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = axes.einsum(x, w, "b k@tp, k@tp f -> b f")
    y.sum().backward()
    print(y.dtype, w.grad.dtype)
```

Forward-mode differentiation (`torch.autograd.forward_ad`) isn't possible, because a collective sends the values of a
tensor and not its tangent. Every rank raises a `ShardingError` before it sends anything. Write
`torch.autograd.functional.jvp` instead. It uses the backward pass, and works for plain tensors and DTensors.

The transforms of `torch.func` (`grad`, `vjp`, `jvp`, `vmap`, `jacrev`, `jacfwd`, `hessian`) wrap tensors, and a
collective can't send a wrapped tensor. Operations of `axes` inside a transform raise a `ShardingError`, also with
`vectorize=True` of `torch.autograd.functional`. Write `torch.autograd.grad`, with `create_graph=True` for higher
derivatives, or `torch.autograd.functional`. `torch.func.functional_call` works, because it transforms nothing.
"""
"""What stands below the tables."""


def results() -> list[Ran]:
    """What happens when four ranks run everything; the same on each, but for how far they are off."""
    return combined(axes.launch(run_everything, 4, timeout=300))


def combined(by_rank: Sequence[Sequence[Ran]]) -> list[Ran]:
    """What happened, of what each rank says: all say the same, but for how far they are off."""
    found = []
    for runs in zip(*by_rank, strict=True):
        off = max(run.off for run in runs)
        assert len({replace(run, off=off) for run in runs}) == 1, f"ranks did different things: {runs}"
        found.append(replace(runs[0], off=off))
    return found


def page(results: Sequence[Ran]) -> str:
    """The page of these results, which are in the order of the rows."""
    parts = [Session().page(INTRODUCTION)]
    left = iter(results)
    for row in ROWS:
        lines = [_line(run, next(left)) for run in row.runs]
        parts += [f"## {row.title}", paragraph(row.why), table(HEADS[type(row.runs[0])], lines)]
    parts.append(Session().page(CLOSING.strip()))
    return "\n\n".join(parts) + "\n"


def off_text(off: float) -> str:
    """How far a gradient is off, in text that stays the same from run to run."""
    return "0" if off == 0 else "< 1e-12" if off < 1e-12 else f"{off:.0e}"


HEADS = {
    Expression: ["view", "expression", "gradient arrives as", "forward", "backward", "gradient comes as", "off by"],
    Region: ["region", "function", "gradient arrives as", "inside", "forward", "backward", "comes as", "off by"],
    Crossing: ["call", "same use: backward", "gradient", "different use: backward", "gradient"],
}


def _line(run: Expression | Region | Crossing, ran: Ran) -> list[str]:
    sent = [", ".join(kinds) or "nothing" for kinds in (ran.forward, ran.backward)]
    off = off_text(ran.off)
    if isinstance(run, Crossing):
        return [inline(run.call), sent[0], ran.gradients[0], sent[1], ran.gradients[1]]
    if isinstance(run, Region):
        inside, outside = ran.gradients
        return [inline(run.text), inline(run.call), inline(run.arrives), inside, *sent, inline(outside), off]
    call = " ".join([*([] if run.kind == "rearrange" else [run.kind]), *run.how, inline(run.text)])
    arrives = run.arrives or of_summand(run.text.split("->")[1].strip())
    comes = ran.gradients or [of_summand(spec) for spec in run.operands_alone]
    return [run.view, call, inline(arrives), *sent, ", ".join(map(inline, comes)), off]


def of_summand(spec: str) -> str:
    """How the gradient of a plain tensor lies over the ranks, by the rule of the border; on `same` axes it is whole."""
    mesh = Mesh(declaration_of(spec))
    plain, _, same = spec.partition("| same@")
    dual = cotangent(mesh.sharding(plain))
    return replace(dual, pending=tuple([(op, each) for op, each in dual.pending if mesh.called(each) != same])).spec


INTRODUCTION = f"""# Gradients

{WRITTEN}

Over each axis a tensor is replicated (R), split (S) or pending (P; torch's `Partial`). Its gradient has one of these
three states too, but often not the state of the tensor. Which state the gradient has depends on the view.

- **Global view**: DTensors. There is one tensor, one loss and one gradient. The gradient of a result may arrive in
  any sharding. A gradient stays pending until an operation needs it reduced. If a leaf is used several times, the
  backward pass adds up the gradients of all uses, and then reduces the sum once. The reduced gradient has the
  sharding of the leaf. If the leaf itself is pending over an axis, its gradient is replicated over this axis.
- **Local view**: plain tensors. Each rank has its own tensor and its own loss, and the backward pass differentiates
  the sum of all losses. So the gradient of a replicated tensor is pending: each rank has one term. The gradient of a
  pending tensor is replicated. In a spec, `| same@tp` (I in the headings below) declares that the tensor is
  replicated over `tp` and that its gradient isn't pending: every rank has the whole gradient.

This example has the weight of a data-parallel model in the global view. The backward pass gives a gradient that is
pending over `dp`, and `axes` reduces it before it becomes `.grad`:

```python
import axes, torch
with axes.simulate(4):
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    x = axes.ones("b@dp d", mesh=mesh, b=8, d=4)
    w = axes.ones("d f@tp", mesh=mesh, d=4, f=6, requires_grad=True)
    y = axes.einsum(x, w, "b d, d f -> b f")
    y.backward(torch.ones_like(y))
    axes.spec_of(w.grad)
```

`axes` reduces the gradient of every leaf that one of its functions makes (`shard`, `from_local`, `zeros` and so on),
even if only torch's own operations use the leaf. From such a leaf torch can make a new leaf: `nn.Parameter(x)`,
`x.detach()` or a copy. The gradient of the new leaf is reduced if at least one operation of `axes` uses the new leaf.
To get a gradient that stays pending, compute with `v = w.view_as(w)` and take `torch.autograd.grad(loss, v)`.

A gradient can be differentiated again. With `create_graph=True`, second and higher derivatives are equal to those of
one device, also if a tensor changes from one view to the other.

The rest of this page is one table for each kind of operation. Four ranks ran every row forward and backward. The
columns of most tables are:

- "gradient arrives as": the sharding of the result's gradient when the backward pass begins.
- "forward" and "backward": the collectives that ran. In the global view the last collective of the backward pass may
  be the one that brings the gradient to the sharding of the leaf.
- "gradient comes as": the sharding of the operand's gradient, in the global view before this last collective.
- "off by": the largest difference of any value or gradient from one device.

How the rows were measured:

- In the rows of the local view the shards come from DTensors: `axes.to_local` took the shards out, and
  `axes.from_local` put the results back, both with `grad="summed"` (explained at the end of this page).
- A permutation is shown as an all-to-all.
- The ranks communicate by gloo. Over gloo, `axes` runs the reduce-scatter of a [plan](redistribution.md) as an
  all-to-all and a local sum. Collectives by name, such as `axes.psum_scatter`, run gloo's own reduce-scatter."""
