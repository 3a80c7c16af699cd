"""A law of training: steps of a small model leave the parameters of one device.

Together are drawn: the layers, over what activations and weights are split while they compute, on which mesh and how
each parameter lies (another factorization, unevenly, by a factor, replicated), rules or specs, values drawn or
given, recomputed layers, clipping, the optimizer, and a checkpoint from which it goes on, on other meshes.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import axes
from tests.common import case
from tests.strategies import place
from tests.whole_cases import Draw, Grid, Random, check, held, refusal

WEIGHTS = {
    "mlp": {"up": "f e", "down": "e f"},
    "region": {"up": "f e", "down": "e f"},
    "heads": {"up": "(h k) e", "down": "e (h k)"},
    "experts": {"up": "n g e", "down": "n e g"},
    "rms": {"gain": "e"},
    "norm": {"gain": "e", "shift": "e"},
    "named": {"norm.weight": "e", "up.weight": "f e", "up.bias": "f", "down.weight": "e f"},
}
"""By the kind of a layer its parameters, with the names of their dims."""

Places = Mapping[str, str]
"""Over what each name is split while the model computes, as `@tp`; on one device there are none."""


def spec_of(names: str, places: Places, sizes: Mapping[str, int]) -> str:
    """`(h k) e` as `(h=4@tp k=2) e`."""
    said = {name: (f"{name}={size}" if "(" in names and name in "hk" else name) for name, size in sizes.items()}
    return "".join(
        said.get(letter, letter) + places.get(letter, "") if letter.isalpha() else letter for letter in names
    )


class Layer(nn.Module):
    """A layer of some kind; `places` and `mesh` say where it computes."""

    def __init__(self, kind: str, sizes: Mapping[str, int], places: Places, mesh: axes.Mesh | None):
        super().__init__()
        self.kind, self.sizes, self.places, self.mesh = kind, sizes, places, mesh
        if kind == "named":
            self.norm = axes.nn.RMSNorm("b s e", over="e", e=sizes["e"])
            self.up = axes.nn.Einsum("b s e, f e -> b s f", e=sizes["e"], f=sizes["f"])
            self.down = axes.nn.Einsum("b s f@*, e f@* -> b s e", e=sizes["e"], f=sizes["f"])
            return
        for name, names in WEIGHTS[kind].items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape_of(names, sizes))))

    def reset_parameters(self) -> None:
        for weight in self.parameters(recurse=False):
            nn.init.normal_(weight, std=0.5)

    def spec(self, names: str) -> str:
        return spec_of(names, self.places, self.sizes)

    def weight(self, name: str) -> Tensor:
        """A weight where it is used."""
        weight = getattr(self, name)
        return axes.reshard(weight, self.spec(WEIGHTS[self.kind][name]), mesh=self.mesh) if self.mesh else weight

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "named":
            return x + self.down(self.up(self.norm(x)).tanh())
        if self.kind == "rms":
            return axes.rms_norm(x, "b s e", over="e", weight=self.weight("gain"))
        if self.kind == "norm":
            return axes.layer_norm(x, "b s e", over="e", weight=self.weight("gain"), bias=self.weight("shift"))
        up, down = self.weight("up"), self.weight("down")
        if self.kind == "region" and self.mesh:
            names = self.places.get("f", "").strip("@()").split()
            expression = self.spec("b s e, f e, e f -> b s e")
            return x + axes.shard_map(lambda *of: summed(mlp(*of), names), expression, mesh=self.mesh)(x, up, down)
        if self.kind == "region":
            return x + mlp(x, up, down)
        inner = {"mlp": "f", "heads": "h k", "experts": "n g"}[self.kind]
        one, two = (self.spec(WEIGHTS[self.kind][name]) for name in ("up", "down"))
        inside, outside = self.spec(f"b s {inner}"), self.spec("b s e")
        h = axes.einsum(x, up, f"{outside}, {one} -> {inside}").tanh()
        return x + axes.einsum(h, down, f"{inside}, {two} -> {outside}")


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (x @ up.mT).tanh() @ down.mT


def summed(x: Tensor, names: Sequence[str]) -> Tensor:
    return axes.psum(x, tuple(names)) if names else x


def shape_of(names: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    dims = names.replace("(h k)", "hk").split()
    return tuple(math.prod(sizes[letter] for letter in dim) for dim in dims)


class Net(nn.Module):
    """An embedding, layers and a head, which may be the embedding's weight; it gives the loss."""

    def __init__(
        self,
        layers: str,
        sizes: Mapping[str, int],
        tied: bool = False,
        recompute: bool = False,
        places: Places | None = None,
        mesh: axes.Mesh | None = None,
    ):
        super().__init__()
        self.table, self.sizes, self.places, self.mesh = (
            nn.Parameter(torch.empty(sizes["v"], sizes["e"])),
            sizes,
            places or {},
            mesh,
        )
        self.layers = nn.ModuleList(Layer(kind, sizes, self.places, mesh) for kind in layers.split())
        self.head = self.table if tied else nn.Parameter(torch.empty(sizes["v"], sizes["e"]))
        self.recompute = recompute
        for module in self.modules() if not self.table.is_meta else ():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table)
        if self.head is not self.table:
            nn.init.normal_(self.head)

    def names(self) -> dict[str, str]:
        """The names of the dims of each parameter."""
        kinds = [(f"layers.{at}.", layer.kind) for at, layer in enumerate(self.layers)]
        inner = {prefix + name: names for prefix, kind in kinds for name, names in WEIGHTS[kind].items()}
        return {name: inner.get(name, "v e") for name, _ in self.named_parameters()}

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        table, head = self.table, self.head
        text = [spec_of(names, self.places, self.sizes) for names in ("b s", "v e", "b s e", "b s v")]
        ids, weight, hidden, logits = text
        if self.mesh:
            tokens, labels = (axes.shard(x, ids, mesh=self.mesh) for x in (tokens, labels))
            table, head = (axes.reshard(x, weight, mesh=self.mesh) for x in (table, head))
        x = axes.embedding(tokens, table, f"{ids}, {weight} -> {hidden}")
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            if self.mesh:  # torch's own sum of DTensors replicates dims of size 1
                x = axes.reshard(x, hidden)
        y = axes.einsum(x, head, f"{hidden}, {weight} -> {logits}")
        return axes.cross_entropy(y, labels, f"{logits}, {ids} -> ")


def data(seed: int, shape: tuple[int, int], words: int) -> list[Tensor]:
    """Tokens and labels."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(words, shape, generator=generator) for _ in range(2)]


def alike(one: nn.Module, many: nn.Module, where: Mapping[str, tuple[Grid, str]], what: str = "parameter") -> None:
    """Parameters or gradients are those of one device, and lie as they should."""
    for (name, whole), (_, x) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        with case(f"{what} {name}"):
            if what == "gradient":
                whole, x = whole.grad, x.grad
            check(x, whole, *where[name])


def changed(one: nn.Module, many: nn.Module, seed: int) -> None:
    """Some gradients are missing, lie otherwise than their parameter, or are pending."""
    random = Random(seed)
    for whole, x in zip(one.parameters(), many.parameters(), strict=True):
        kind, spec, mesh = (
            random.choice(("there", "missing", "whole", "pending")),
            axes.spec_of(x),
            axes.sharding_of(x).mesh,
        )
        free = [name for name, size in mesh.shape.items() if size > 1 and not re.search(rf"\b{name}\b", spec)]
        if kind == "missing":
            whole.grad = x.grad = None
        elif kind == "whole":
            x.grad = axes.shard(whole.grad, " ".join(["_"] * x.ndim), mesh=mesh)
        elif kind == "pending" and free:
            at, local = mesh.axis(free[0]).index, held(x.grad)
            local = local - 1 if at == 0 else torch.full_like(local, float(at == 1))
            x.grad = axes.from_local(local, f"{spec} | sum@{free[0]}", mesh=mesh, shape=x.shape)


def filled(one: nn.Module, many: nn.Module) -> None:
    """Gives the model of one device the values of the other."""
    with torch.no_grad():
        for whole, x in zip(one.parameters(), many.parameters(), strict=True):
            whole.copy_(axes.unshard(x) if isinstance(x, DTensor) else x)


def resumed(model: nn.Module, optimizer: Any, fresh: nn.Module, others: Any) -> None:
    """Saves a model and its optimizer, and loads others from there."""
    with shared_folder() as folder:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        weights, state = get_state_dict(fresh, others)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(fresh, others, model_state_dict=weights, optim_state_dict=state)


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that all ranks see while they are in it."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name, 0)
    try:
        yield name[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(name[0], ignore_errors=True)


OPTIMIZERS = (
    "torch.optim.SGD, {}, lr=0.1, momentum=0.9, nesterov=True",
    "torch.optim.AdamW, {}, lr=0.05, eps=1e-3, weight_decay=0.1, fused=True",
    "torch.optim.Adam, {}, lr=0.05, eps=1e-3, amsgrad=True",
    "Each, {}, lr=0.1",
)


def computed(d: Draw, grid: Grid, sizes: dict[str, int], layers: Sequence[str]) -> dict[str, str]:
    """Names of the mesh on names of dims, where a DTensor can have it: `{"b": "@dp", "f": "@tp"}`."""
    found: dict[str, str] = {}
    every = {"b s", "b s v", "v e", *(names for kind in layers for names in WEIGHTS[kind].values())}
    every |= {f"b s {inner}" for inner in ("f", "h k", "n g")}
    for name in d.family(grid):
        for letter in d.random.sample("bsvfhn", 6)[: 2 + d.random.randrange(3)]:
            # `b` and `s` are in all, the others never together: they may share an axis.
            taken = {at for at, where in found.items() if where == place([name])}
            if letter in found or taken & set("bs") or (taken and letter in "bs"):
                continue
            trial = {**found, letter: place([name])}
            if all(refusal(grid, spec_of(n, trial, sizes), shape_of(n, sizes)) is None for n in every):
                found = trial
    return found


def lying(
    d: Draw, net: Net, grid: Grid, g: str, places: dict[str, str], stored: float
) -> dict[str, tuple[Grid, str, str]]:
    """Of each parameter a grid, its name and a spec: where it is computed with, or anywhere."""
    found = {}
    for name, names in net.names().items():
        to, t, spec = grid, g, spec_of(names, places, net.sizes)
        if d.chance(stored) and "named" not in kind_of(net, name):
            to, t = (grid, g) if d.chance(0.5) else d.grid(sub=False)
            spec = d.accepted(to, shape_of(names, net.sizes))
        d.note(to, spec, shape_of(names, net.sizes))
        found[name] = to, t, spec
    return found


def kind_of(net: Net, name: str) -> str:
    return net.layers[int(name.split(".")[1])].kind if name.startswith("layers.") else "table"


def training(d: Draw) -> None:
    """Three steps leave the parameters of one device, however the model is split, and wherever it goes on."""
    p, random = d.program, d.random
    grid, g = d.grid(sub=False)
    layers = [random.choice(list(WEIGHTS)) for _ in range(random.choice((1, 2, 2, 3)))]
    ranges = {"b": (2, 3, 4, 8), "s": (1, 3, 4), "v": (5, 8, 12), "e": (4, 5), "f": (4, 6, 7), "h": (2, 4), "k": (1, 2)}
    sizes = {name: random.choice(choices) for name, choices in {**ranges, "n": (2, 3, 4), "g": (2, 3)}.items()}
    options = f"{' '.join(layers)!r}, {sizes}, {d.chance(0.3)}, {d.chance(0.3)}"
    p.do(
        "from tests.law_training import Net, alike, changed, data, filled, resumed; from tests.own_optimizers import Each"
    )
    p.do(f"torch.manual_seed({d.seed()}); one = Net({options}).double()")
    d.features.add("training")
    kind = random.choice(OPTIMIZERS)
    p.do(f"OPT = {made(kind, 'one', 'torch')}")
    where = placed(d, "many", options, grid, g, layers, sizes)
    p.do("filled(one, many)")
    p.do(f"opt = {made(kind, 'many')}")
    order, limit = random.choice(("2.0", "1.0", "math.inf")), random.choice((0.1, 1.0, 1e6))
    for step in range(3):
        # torch's loader asks for the momentum of a parameter that never had a gradient, on one device as well
        kept = kind.startswith("Each") or all(x in p["OPT"].state for x in p["one"].parameters())
        if step and d.ranks == 8 and kept and d.chance(0.3):
            d.features.add("resumed")
            where = placed(d, "again", options, *d.grid(sub=False), layers, sizes)
            p.do(f"its = {made(kind, 'again')}; resumed(many, opt, again, its); many, opt = again, its")
        p.do(f"t, l = data({d.seed()}, {(sizes['b'], sizes['s'])}, {sizes['v']})")
        p.do("loss, LOSS = many(t, l), one(t, l); loss.backward(); LOSS.backward()")
        p.do("same(axes.unshard(loss), LOSS, 'loss')")
        p.do(f"alike(one, many, {where}, 'gradient')")
        if d.chance(0.5):
            d.features.add("gradients of all kinds")
            p.do(f"changed(one, many, {d.seed()})")
        p.do(f"norm = axes.nn.clip_grad_norm_(many.parameters(), {limit}, {order})")
        p.do(f"same(norm, torch.nn.utils.clip_grad_norm_(one.parameters(), {limit}, {order}).double(), 'norm')")
        p.do(f"opt.step(); OPT.step(); alike(one, many, {where})")
        p.do("opt.zero_grad(); OPT.zero_grad()")


def made(kind: str, model: str, by: str = "") -> str:
    if by == "torch":
        name, rest = kind.split(", ", 1)
        return f"{name}({rest.format(f'{model}.parameters()')})"
    own = ", elementwise=True" if kind.startswith("Each") else ""
    return f"axes.nn.local_optimizer({kind.format(f'{model}.parameters()')}{own})"


def placed(d: Draw, name: str, options: str, grid: Grid, g: str, layers: Sequence[str], sizes: dict[str, int]) -> str:
    """Makes a sharded model; the text of where each parameter lies."""
    p, m = d.program, f"m{g[1:]}"
    places = computed(d, grid, sizes, layers)
    net: Net = p["one"]
    by_rules = d.chance(0.25)
    lie = lying(d, net, grid, g, places, 0.0 if by_rules else 0.7)
    deferred = d.chance(0.3)
    p.do(f"with torch.device({'meta' if deferred else 'cpu'!r}): {name} = Net({options}, {places}, {m}).double()")
    if not deferred:
        p.do(f"{name}.load_state_dict(one.state_dict())")
    if by_rules and is_even(grid, places, sizes):
        d.features.add("by rules")
        rules = {letter: axis.strip("@()") for letter, axis in places.items()}
        names = {at: spec_of(n, {}, sizes) for at, n in net.names().items()}
        p.do(f"axes.shard_module({name}, {names}, {m}, axes.Rules([*{rules}.items(), ('...', None)]))")
    else:
        specs, meshes = ({at: each[i] for at, each in lie.items()} for i in (2, 1))
        where = "{" + ", ".join(f"{at!r}: m{t[1:]}" for at, t in meshes.items()) + "}"
        p.do(f"axes.shard_module({name}, {specs}, {where})")
    return "{" + ", ".join(f"{at!r}: ({t}, {spec!r})" for at, (_, t, spec) in lie.items()) + "}"


def is_even(grid: Grid, places: Places, sizes: Mapping[str, int]) -> bool:
    return all(sizes[letter] % grid.sizes[axis.strip("@()")] == 0 for letter, axis in places.items())
