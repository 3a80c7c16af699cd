"""Wrong input to every public function, from numbers: the same number is the same call, in every process.

`doors(mesh)` has a right call of each public function and method. `hostile(door, number)` is that call with one or several of
its arguments replaced by what nobody should pass: other types, other tensors, text with characters changed, numbers
without end, objects that raise when they are looked at.
"""

from __future__ import annotations

import functools
import random
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import axes


@dataclass(frozen=True)
class Fresh:
    """An argument that a call may change: made anew for each."""

    make: Callable[[], Any]


class Door:
    """A public function, and a right call of it. `sized`: it takes sizes as keywords."""

    def __init__(self, call: Callable[..., Any], *arguments: Any, sized: bool = False, **keywords: Any):
        self.call, self.arguments, self.keywords, self.sized = call, arguments, keywords, sized


@dataclass
class Case:
    """One call, and what is hostile in it."""

    call: Callable[..., Any]
    arguments: list[Any]
    keywords: dict[str, Any]
    what: list[str] = field(default_factory=list)

    def run(self) -> Any:
        return self.call(*self.arguments, **self.keywords)


# ------------------------------------------------------------------------------------- objects


class Loud(Exception):
    """What hostile objects raise: no exception of Python's or torch's."""


def raising(method: str, kind: type[Exception]) -> type:
    """A class with one method that raises."""

    def raises(*_: object, **__: object) -> object:
        raise kind(f"{method} of a hostile object")

    return type(f"Raising{method.strip('_').title()}", (), {method: raises})


METHODS = ("__eq__", "__hash__", "__repr__", "__str__", "__len__", "__index__", "__iter__", "__bool__", "__float__")
RAISING = [raising(method, kind) for method in METHODS for kind in (Loud, TypeError, ValueError)]
RAISING += [raising("__getattr__", Loud), raising("__torch_function__", Loud), raising("__fspath__", Loud)]


class Text(str):
    """A string of another class."""


class Whole(int):
    """A number of another class."""


class Quiet(torch.Tensor):
    """A tensor of another class."""


def looped() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def numbers_then_noise() -> Iterator[int]:
    yield 1
    raise Loud("a generator that fails")


# ------------------------------------------------------------------------------------- values

NUMBERS: list[Any] = [
    -1, 0, 1, 2, 3, 5, 7, 8, 64, 1000, -(2**31), 2**45, 2**48, 2**48 + 1, 2**63, 2**64, -(2**64), 10**400, -(10**400),
    10**5000, True, False, 0.0, -0.0, 0.5, 4.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"), 4 + 0j,
    Whole(4), np.int64(4), np.uint8(255), np.float64(4), np.float32("nan"), np.bool_(True), np.array(4),
    np.array([1, 2]), np.str_("b"),
]  # fmt: skip

# Those that a dict can have as keys.
KEYS = [number for number in NUMBERS if not isinstance(number, np.ndarray)]

TEXTS: list[str] = [
    "", " ", "\n", "\0", "b\0d", "\ud800", "b \udfff@tp", "é", "ﬁ", "\u202eb d", "b\u00a0d", "b\u200bd", "٣", "b=٣",
    "->", "b ->", "-> b", "b -> d -> b", "@", "@tp", "b@", "b@@tp", "|", "b | ", "b | sum", "b | sum@", "b | sum@tp",
    "...", "... ...", "*", "b@*", "| *", "_", "_@tp", "1", "b 1", "(", ")", "()", "( )", "(b", "b)", "((b))", "(b d)",
    "(b d)@tp", "b=0", "b=-1", "b=1e3", "b=2=3", "b=99999999999999999999", "b,d", ",", ",,", "b, d -> b d", "+",
    "(b + d)", "b + d", "b; d", "nan", "inf", "None", "__class__", "self", "mesh", "sizes", "%s", "{b}", "\\", "'", '"',
    "dp tp dp", "b b", "tp", "dp=2 tp=4", "b@dp d@dp", "b@(dp tp) d@tp", "b@all d@tp", "float32", "cpu", "cuda", "meta",
    "gloo", "nccl", "sum", "mean", "whole",
]  # fmt: skip

LONG: list[Callable[[], str]] = [
    lambda: "b" * 10**6, lambda: "b " * 5 * 10**5, lambda: "(" * 10**5, lambda: "(" * 2000 + "b" + ")" * 2000,
    lambda: " ".join(f"n{i}" for i in range(3000)), lambda: "(" + " ".join(f"n{i}" for i in range(3000)) + ")",
    lambda: " -> ".join("b d" for _ in range(2000)), lambda: ", ".join("b d" for _ in range(2000)) + " -> b d",
    lambda: "b=" + "9" * 10**5, lambda: "b@(" + "tp " * 3000 + ")",
    lambda: "b | " + " ".join("sum@tp" for _ in range(3000)), lambda: "\ud800" * 10**6, lambda: "\0" * 10**5,
    lambda: "é" * 10**5, lambda: "(b + " * 500 + "d" + ")" * 500, lambda: "@" * 10**5,
    lambda: ("x" * 100_000) + " -> " + ("x" * 100_000), lambda: " = ".join(f"a{i}" for i in range(2000)),
    lambda: " ".join(f"a{i}=2" for i in range(2000)),
]  # fmt: skip

ALPHABET = "bdhs @@(())->=,|+*._ 0123456789\n\0é\ud800'\"%"
PIECES = [
    "->", "@tp", "@dp", "@(dp tp)", "@*", "(", ")", "...", " | sum@tp", " | *", "=3", "=0", ",", " + ", "_", "tp", "b",
    "99999999999",
]  # fmt: skip


CHANGES: list[Callable[[random.Random, str, int, int], str]] = [
    lambda rng, text, at, to: text[:at] + text[at + 1 :],
    lambda rng, text, at, to: text[:at] + rng.choice(ALPHABET) + text[at:],
    lambda rng, text, at, to: text[:at] + rng.choice(ALPHABET) + text[at + 1 :],
    lambda rng, text, at, to: text[:at] + rng.choice(PIECES) + text[at:],
    lambda rng, text, at, to: text[:to] + text[at:to] + text[to:],
    lambda rng, text, at, to: text[:at] + "(" + text[at:to] + ")" + text[to:],
    lambda rng, text, at, to: " ".join(rng.sample(text.split(" "), len(text.split(" ")))),
    lambda rng, text, at, to: text[:at] + text[to:],
]


def mutated(rng: random.Random, text: str) -> str:
    """`text` after a few changes of characters and pieces."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        text = rng.choice(CHANGES)(rng, text, at, to)
    return text


def texts(rng: random.Random, right: str | None = None) -> str:
    """Text of any kind; mostly the right one with a few changes, where there is a right one."""
    chance = rng.random()
    if right is not None and chance < 0.75:
        return mutated(rng, right)
    if chance < 0.8:
        return rng.choice(LONG)()
    if chance < 0.85:
        return Text(rng.choice(TEXTS))
    if chance < 0.9:
        return "".join(rng.choice(ALPHABET) for _ in range(rng.choice((1, 3, 10, 100))))
    return rng.choice(TEXTS)


def _whole(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).view(shape) / 7


TENSORS: list[Callable[[], Any]] = [
    lambda: torch.tensor(4), lambda: torch.tensor(4.0), lambda: torch.tensor([]), lambda: torch.zeros(0, 8),
    lambda: torch.zeros(8, 0), lambda: _whole(8), lambda: _whole(3, 5), lambda: _whole(8, 8, 8),
    lambda: _whole(*([1] * 20)), lambda: _whole(*([1] * 60)), lambda: _whole(8, 8).to(torch.int64),
    lambda: _whole(8, 8).to(torch.uint8), lambda: _whole(8, 8) > 1, lambda: _whole(8, 8).to(torch.float16),
    lambda: _whole(8, 8).to(torch.bfloat16), lambda: _whole(8, 8).to(torch.float8_e4m3fn),
    lambda: _whole(8, 8).to(torch.uint16), lambda: _whole(8, 8).to(torch.complex64),
    lambda: _whole(8, 8).to(torch.complex64).conj(), lambda: torch._neg_view(_whole(8, 8)),
    lambda: torch.full((8, 8), float("nan")), lambda: _whole(8, 8).requires_grad_(),
    lambda: _whole(8, 8).requires_grad_() * 2, lambda: _whole(8, 8).t(), lambda: _whole(8).expand(8, 8),
    lambda: _whole(64).as_strided((8, 8), (1, 1)), lambda: torch.zeros(8, 8, device="meta"),
    lambda: _whole(8, 8).to_sparse(), lambda: _whole(8, 8).to_sparse_csr(),
    lambda: torch.quantize_per_tensor(_whole(8, 8), 0.1, 0, torch.quint8),
    lambda: torch.nested.nested_tensor([_whole(2, 3), _whole(4, 3)]),
    lambda: torch.nested.nested_tensor([_whole(2, 3), _whole(4, 3)], layout=torch.jagged),
    lambda: _whole(8, 8).as_subclass(Quiet), lambda: nn.Parameter(_whole(8, 8)), lambda: nn.UninitializedParameter(),
    lambda: torch.zeros(8, 8).as_subclass(nn.Buffer), lambda: torch._C._functions.UndefinedGrad,
    lambda: np.ones((8, 8)), lambda: [_whole(8, 8)], lambda: (_whole(8, 8), _whole(8, 8)),
    lambda: [_whole(8, 8), _whole(3, 5)], lambda: [1, 2, 3], lambda: {"x": _whole(8, 8)}, lambda: torch.Tensor,
    lambda: torch.zeros(8, 8).numpy().tolist(),
]  # fmt: skip

OTHERS: list[Callable[[], Any]] = [
    lambda: None, lambda: b"b d", lambda: bytearray(b"b d"), lambda: object(), lambda: object, lambda: type,
    lambda: ..., lambda: NotImplemented, lambda: (), list, dict, set, lambda: frozenset("bd"), looped,
    numbers_then_noise, lambda: (i for i in range(3)), lambda: iter([]), lambda: range(8), lambda: range(10**18),
    lambda: range(8, 0, -1), lambda: slice(None), lambda: [None], lambda: [1, "b", None], lambda: ["b", "d"],
    lambda: ("dp", "tp"), lambda: {"b": 8}, lambda: {1: 2}, lambda: {None: None}, lambda: {"b": "d"},
    lambda: {"*": "..."}, lambda: {"\ud800": -1}, lambda: {("b",): [1]}, lambda: lambda *a, **k: None, lambda: print,
    lambda: axes, lambda: axes.Mesh, lambda: axes.Sharding, lambda: axes.rearrange, lambda: axes.Mesh("dp=2 tp=4"),
    lambda: axes.Mesh("x=3"), lambda: axes.Mesh("dp=2 tp=4").sharding("b@dp d@tp"),
    lambda: axes.Mesh("dp=2 tp=4").layout("tp"), lambda: axes.Rules(b="dp"), lambda: axes.GroupOptions(),
    lambda: axes.CostModel(), lambda: torch.float32, lambda: torch.int64, lambda: torch.complex64,
    lambda: torch.device("meta"), lambda: torch.Size([8, 8]), lambda: torch.Generator(), lambda: nn.Linear(4, 4),
    lambda: nn.Linear, lambda: nn.ModuleList([nn.Linear(2, 2)]),
    lambda: torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1), lambda: torch.optim.SGD,
    lambda: ValueError("an error"), lambda: np.zeros(3), lambda: np.array(["b", None], dtype=object), lambda: [8, 8.0],
    lambda: [10**400], lambda: [-1, 8], lambda: [2**40, 2**40], lambda: [2**62] * 4, lambda: [1] * 5000,
    lambda: [float("nan"), 8], lambda: [(0, 1), (1, 0)], lambda: [(0, 0), (0, 1)], lambda: [[[[]]]],
    lambda: list(range(100_000)),
]  # fmt: skip


def anything(rng: random.Random) -> Any:
    """A value of any kind."""
    return rng.choice(KINDS)(rng)


KINDS: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice(NUMBERS),
    lambda rng: rng.choice(NUMBERS),
    texts,
    lambda rng: rng.choice(TENSORS)(),
    lambda rng: rng.choice(RAISING)(),
    lambda rng: [rng.choice((anything, texts))(rng) for _ in range(rng.randrange(3))],
    lambda rng: {rng.choice(TEXTS): anything(rng) for _ in range(rng.randrange(3))},
    *[lambda rng: rng.choice(OTHERS)()] * 4,
]
# What is longer isn't changed element by element: a range may be longer than memory.
MOST_ITEMS = 10_000


def instead_of(rng: random.Random, right: Any, foreign: list[Any]) -> Any:
    """Something hostile for an argument that should be like `right`."""
    if rng.random() < 0.3:
        return anything(rng)
    if foreign and rng.random() < 0.3:
        return rng.choice(foreign)
    if isinstance(right, str):
        return texts(rng, right)
    if isinstance(right, torch.Tensor):
        return rng.choice(TENSORS)()
    if isinstance(right, bool | int | float):
        return rng.choice(NUMBERS)
    if isinstance(right, tuple | list | range) and 0 < len(right[:MOST_ITEMS]) < MOST_ITEMS:
        changed = list(right)
        for _ in range(rng.choice((1, 1, 2))):
            match rng.randrange(4):
                case 0 if changed:
                    del changed[rng.randrange(len(changed))]
                case 1:
                    changed.insert(rng.randrange(len(changed) + 1), anything(rng))
                case _ if changed:
                    at = rng.randrange(len(changed))
                    changed[at] = instead_of(rng, changed[at], foreign)
        return changed if rng.random() < 0.3 else tuple(changed)
    if isinstance(right, Mapping) and len(right):
        items = dict(right)
        key = rng.choice(list(items))
        match rng.randrange(4):
            case 0:
                items[rng.choice(TEXTS)] = anything(rng)
            case 1:
                items[texts(rng, key) if isinstance(key, str) else rng.choice(KEYS)] = items.pop(key)
            case _:
                items[key] = instead_of(rng, items[key], foreign)
        return items
    return anything(rng)


def right(value: Any) -> Any:
    return value.make() if isinstance(value, Fresh) else value


def right_case(door: Door) -> Case:
    return Case(door.call, [right(value) for value in door.arguments], {k: right(v) for k, v in door.keywords.items()})


def hostile(door: Door, rng: random.Random, foreign: list[Any]) -> Case:
    """A right call of a door with one or several arguments replaced."""
    case = right_case(door)
    slots: list[int | str] = [*range(len(case.arguments)), *case.keywords]
    for slot in rng.sample(slots, min(len(slots), rng.choice((1, 1, 1, 2, 3)))):
        place: Any = case.arguments if isinstance(slot, int) else case.keywords
        place[slot] = instead_of(rng, place[slot], foreign)
        case.what.append(f"{slot}: {described(place[slot])}")
    chance = rng.random()
    if chance < 0.02 and case.arguments:
        case.arguments.pop()
        case.what.append("one argument less")
    elif chance < 0.04:
        case.arguments.append(anything(rng))
        case.what.append(f"further: {described(case.arguments[-1])}")
    elif chance < 0.12 and door.sized:
        name = rng.choice(("b", "d", "h", "x", "tp", "self", "é", "\ud800", "n" * 10**5))
        case.keywords[name] = rng.choice(NUMBERS) if rng.random() < 0.7 else anything(rng)
        case.what.append(f"{name[:20]!r}={described(case.keywords[name])}")
    return case


def described(value: Any) -> str:
    """A value for a report, whatever its own methods do."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) < 300 else f"{text[:300]}... ({len(text)} characters)"


# Of a result with more numbers a part is compared.
SHOWN = 100_000

# What differs from one call to the next: where an object lies, and the text of a nested tensor, which numbers its dims.
ADDRESS = re.compile(r"0x[0-9a-f]+|(?<=NestedTensor\(size=).*")


def summary(value: Any, values: bool = True, depth: int = 0) -> Any:
    """What is compared of a result: shapes, dtypes, shardings and texts; values where nothing was made up."""
    if isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided or value.is_quantized):
        return type(value).__name__
    if isinstance(value, torch.Tensor) and isinstance(value, nn.UninitializedParameter):
        return "uninitialized"
    if isinstance(value, torch.Tensor):
        values = values and not value.is_meta
        spec = axes.spec_of(value) if isinstance(value, DTensor) else ""
        local = value.detach()
        local = local.to_local() if isinstance(value, DTensor) else local
        for dim in range(local.ndim):  # a view may show 256 bytes as terabytes
            local = local if local.numel() <= SHOWN else local.narrow(dim, 0, 1)
        values = values and local.numel() > 0  # without elements there may be terabytes of empty lists
        return (tuple(value.shape), str(value.dtype), spec, ADDRESS.sub("", repr(local.tolist())) if values else "")
    if isinstance(value, tuple | list) and depth < 4:
        return [summary(each, values, depth + 1) for each in value]
    if isinstance(value, axes.Mesh):
        return value.shape
    if isinstance(value, axes.Sharding):
        return value.spec
    if isinstance(value, nn.Module):
        return {name: summary(tensor, values) for name, tensor in value.state_dict().items()}
    if callable(value) and not isinstance(value, type):
        return "function"
    return ADDRESS.sub("", described(value))


# ------------------------------------------------------------------------------------- doors


class OfTheClass(axes.AxesError):
    """What torch's own class of optimizers says of its options."""


class Model(nn.Module):
    """What is sharded, annotated, loaded and clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16, bias=False), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def with_gradients() -> list[nn.Parameter]:
    parameters = list(model().parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


@functools.cache
def weights() -> str:
    """A folder with the weights of a model, gone with the process."""
    from safetensors.torch import save_file

    folder = tempfile.TemporaryDirectory()
    _FOLDERS.append(folder)
    save_file(model().state_dict(), f"{folder.name}/model.safetensors")
    return folder.name


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def entered(manager: AbstractContextManager[Any]) -> Any:
    with manager as value:
        return value


def doors(mesh: axes.Mesh) -> dict[str, Door]:
    """A right call of everything that is public, on a bound mesh `dp tp` with the names `all`, `kv` and `rep`."""
    algebra = axes.Mesh("dp=2 tp=4", "all = dp tp", "(tp) = kv=2 rep")
    tp, dp = mesh.shape["tp"], mesh.shape["dp"]
    sharding, grouped = algebra.sharding("b@dp d@tp"), algebra.sharding("b@dp (three h@tp)", three=3)
    layout, plan = axes.Layout((2, 4), (8, 1)), axes.plan("b@dp d@tp", "b d", (8, 8), mesh=algebra)
    rules = axes.Rules(b=("dp",), d="tp", h=None)
    table = {("*.q", "*.k"): ("*.qk", "(h k) d, (g k) d -> (h k + g k) d"), "e.{e}": "e", "w?": ("u", "v"), "i": None}
    layouts, shapes = axes.LayoutRules(table), {"a.q": (8, 4), "a.k": (4, 4), "e.0": (3, 5), "e.1": (3, 5), "i": (2,)}
    ways, there = {"w": "b@dp (h d)@tp", "x": "b d@tp"}, {"w": "b@tp d", "x": "b@(tp dp) d"}
    move = axes.transfer(ways, there, mesh, mesh, {"w": (8, 8), "x": (8, 8)})
    plain, labels = _whole(8, 8), torch.arange(8)
    x = axes.shard(plain, "b@dp d@tp", mesh=mesh)
    rows, columns = axes.shard(plain, "b@dp d", mesh=mesh), axes.shard(plain, "b d@tp", mesh=mesh)
    pending = axes.from_local(plain, "b d | sum@tp", mesh=mesh)
    ids = axes.shard(labels, "b@dp", mesh=mesh)
    region = axes.shard_map(lambda x: x * 2, "b@dp d@tp -> b@dp d@tp", mesh=mesh)
    ends = {"mesh": mesh}
    made = {"b": 8, "d": 8, "dtype": torch.float32, "requires_grad": False, "mesh": mesh}
    moves = {"mesh": mesh, "comm_dtype": None, "async_op": False}

    def module(kind: Any, call: tuple[Any, ...], **defaults: Any) -> Callable[..., Any]:
        """Makes a module and calls it."""

        def run(*arguments: Any, inputs: Any = call, **keywords: Any) -> Any:
            made = kind(*arguments, **defaults, **keywords)
            with mesh:
                return made(*inputs) if isinstance(inputs, tuple) else made(inputs)

        return run

    def stepped(optimizer: Any, parameters: Any, **options: Any) -> Any:
        try:
            made = axes.nn.local_optimizer(optimizer, parameters, **options)
            made.step()
        except (ValueError, OverflowError, RuntimeError) as error:
            if "/torch/optim/" not in traceback.extract_tb(error.__traceback__)[-1].filename:
                raise
            raise OfTheClass(str(error)) from None
        return len(made.param_groups)

    def mapped(expression: Any, *inputs: Any, **keywords: Any) -> Any:
        return axes.shard_map(lambda *x: x[0] * 2, expression, **keywords)(*inputs)

    def decorated(expression: Any, *inputs: Any, **keywords: Any) -> Any:
        return axes.shard_map(expression, **keywords)(lambda *x: x[0] * 2)(*inputs)

    return {
        # meshes
        "Mesh": Door(axes.Mesh, "dp=2 tp", "all = dp tp", "(tp) = kv=2 rep", ranks=range(8), ranks_per_node=4, sizes={"tp": 4}, sized=True),
        "Mesh of listed ranks": Door(axes.Mesh, "dp tp", ranks=[0, 2, 1, 3], tp=2, sized=True),
        "Mesh.at": Door(algebra.at, 5),
        "Mesh.axis": Door(algebra.axis, "tp"),
        "Mesh.layout": Door(algebra.layout, "all"),
        "Mesh.[]": Door(algebra.__getitem__, ("tp", "dp")),
        "Mesh.get": Door(algebra.get, "tp", "dp"),
        "Mesh.[one]": Door(algebra.__getitem__, "all"),
        "Mesh.rearrange": Door(algebra.rearrange, "(a b) tp -> a all2=(b tp)", sizes={"a": 2}, sized=True),
        "Mesh.explain": Door(algebra.explain, "dp (kv2 rep2) -> dp rep2 kv2", kv2=2, sizes=None, sized=True),
        "Mesh.define": Door(algebra.define, "loss = dp kv", "(dp kv) = u v", u=2, sizes=None, sized=True),
        "Mesh.sharding": Door(algebra.sharding, "b@dp (three=3 h@tp) | sum@()", sizes={"h": 8}, sized=True),
        "Mesh.==": Door(lambda other: type(algebra).__eq__(algebra, other), algebra),
        "Mesh.ranks_of": Door(algebra.ranks_of, algebra.layout("tp"), 5),
        "Mesh.create_groups": Door(mesh.create_groups, "dp", "tp"),
        "Mesh.abort": Door(mesh["rep"].abort),
        "Mesh.from_device_mesh": Door(axes.Mesh.from_device_mesh, mesh.device_mesh),
        "Mesh.with": Door(lambda mesh: entered(mesh), algebra),
        "Axis.ranks_of": Door(algebra.axis("tp").ranks_of, 5),
        "Axis.all_ranks": Door(algebra.axis("tp").all_ranks),
        "use_mesh": Door(lambda mesh: entered(axes.use_mesh(mesh)), algebra),
        "init_mesh": Door(
            axes.init_mesh,
            *("dp tp", "all = dp tp"),
            device_type="cpu",
            ranks=range(tp * dp),
            ranks_per_node=None,
            options={"tp": axes.GroupOptions(timeout=30)},
            timeout=60,
            sizes={"tp": tp},
            sized=True,
        ),
        "GroupOptions": Door(lambda *a, **k: axes.GroupOptions(*a, **k).text, backend="gloo", pg_options=None, timeout=3.5, lane="one"),
        "GroupOptions.==": Door(lambda other: axes.GroupOptions("gloo").__eq__(other), axes.GroupOptions("gloo")),
        # layouts
        "Layout": Door(axes.Layout, (2, 4), (8, 1)),
        "Layout.of": Door(axes.Layout.of, [(2, 8), (4, 1)]),
        "Layout.product": Door(axes.Layout.product, axes.Layout((2,), (4,)), axes.Layout((4,), (1,))),
        "Layout.complement": Door(layout.complement, 16),
        "Layout.contains": Door(layout.contains, axes.Layout((2,), (8,))),
        "Layout.coordinate": Door(layout.coordinate, 9),
        "Layout.divide": Door(layout.divide, axes.Layout((4,), (1,))),
        "Layout.offset": Door(layout.offset, 5),
        "Layout.offsets": Door(layout.offsets),
        "Layout.overlaps": Door(layout.overlaps, axes.Layout((2,), (1,))),
        "Layout.split": Door(layout.split, (2, 4)),
        "Layout.within": Door(layout.within, axes.Layout((2, 4), (8, 1))),
        "Layout.contains itself": Door(layout.contains, layout),
        # shardings
        "Sharding.local_shape": Door(sharding.local_shape, (8, 12), rank=3),
        "Sharding.local_shape of a factor": Door(grouped.local_shape, (8, 24), rank=3),
        "Sharding.local_indices": Door(grouped.local_indices, (8, 24), rank=3),
        "Sharding.extents": Door(sharding.extents, (8, 12)),
        "Sharding.divides": Door(sharding.divides, (8, 12)),
        "Sharding.at": Door(sharding.at, (8, 12)),
        "Sharding.sized": Door(grouped.sized, (8, 24)),
        "Sharding.largest_tile": Door(sharding.largest_tile, (8, 12)),
        "Sharding.tile": Door(sharding.tile, (8, 12), 3),
        "Sharding.tile of a factor": Door(grouped.tile, (8, 24), 3),
        "Sharding.on": Door(sharding.on, axes.Mesh("u=2 v=4")),
        "Sharding.is_equivalent": Door(sharding.is_equivalent, sharding, (8, 12)),
        "Sharding.from_placements": Door(axes.Sharding.from_placements, algebra, sharding.placements, 2, (8, 12)),
        "Sharding.==": Door(lambda other: type(sharding).__eq__(sharding, other), sharding),
        # plans
        "plan": Door(axes.plan, "b@dp (three h@tp)", "b@tp d@dp", (8, 24), dtype="bfloat16", mesh=algebra, cost_model=axes.CostModel(), sizes={"three": 3}, sized=True),
        "plan between meshes": Door(axes.plan, "b@dp d", "b@u d@v", (8, 24), source_mesh=algebra, target_mesh=axes.Mesh("u=4 v=2"), sized=True),
        "plan of shardings": Door(axes.plan, sharding, algebra.sharding("b d@tp"), (8, 8), dtype=torch.float32),
        "Plan.at": Door(lambda rank: str(plan.at(rank)), 3),
        # transfers
        "transfer": Door(axes.transfer, ways, there, algebra, axes.Mesh("dp=4 tp=2"), {"w": (8, 8), "x": (8, 8)}, dtype="bfloat16", bucket_mb=1, sizes={"h": 2}),
        "transfer between stages": Door(axes.transfer, ways, there, source_mesh={"w": algebra.at(0), "*": algebra}, target_mesh={"*": axes.Mesh("dp=4 tp=2")}, shapes={"w": (8, 8), "x": plain}, dtype={"w": "float16"}, sized=True),
        "Transfer.at": Door(lambda rank: str(move.at(rank)), 0),
        "Transfer()": Door(lambda *a, **k: [*move(*a, **k).values()], {"w": plain[: 8 // dp, : 8 // tp], "x": plain[:, : 8 // tp]}, into=Fresh(lambda: {"w": torch.zeros(8 // tp, 8), "x": torch.zeros(8 // tp // dp, 8)})),
        "LayoutRules": Door(lambda *a, **k: axes.LayoutRules(*a, **k).applied(shapes), table, g=1, sized=True),
        "LayoutRules.applied": Door(lambda *a: str(layouts.applied(*a)), shapes),
        "LayoutRules.keeps": Door(layouts.keeps, "i"),
        "from_partition_spec": Door(axes.convert.from_partition_spec, ("dp", None, ("tp", "kv")), "b s (h k)"),
        "to_partition_spec": Door(axes.convert.to_partition_spec, "b@dp s (h k)@(kv tp)"),
        "from_logical_rules": Door(axes.convert.from_logical_rules, (("b", ("dp", "kv")), ("d", None))),
        "to_logical_rules": Door(axes.convert.to_logical_rules, axes.Rules(b="dp", d=None)),
        "from_tp_plan": Door(axes.convert.from_tp_plan, {"*.up": "colwise"}, {"0.up.weight": (8, 4)}, "tp"),
        "to_tp_plan": Door(axes.convert.to_tp_plan, {"0.up.weight": "_@tp _"}, "tp", ()),
        "explain": Door(axes.explain, "b@dp d@tp -> b d", (8, 8), mesh=algebra, dtype="float32", op="sum", kind=None, sizes=None, sized=True),
        "explain of sizes": Door(axes.explain, "b@dp (h k) -> b", sizes={"b": 8, "h": 2, "k": 4}, mesh=algebra, op="max"),
        "explain of a step": Door(lambda x, **k: axes.explain(lambda x: axes.reshard(x, "b d"), x, **k), x, mesh=None),
        "show": Door(lambda what, *a, **k: str(axes.show(what, *a, **k)), sharding, (8, 12), rank=3),
        "show a mesh": Door(lambda what, **k: axes.show(what, **k).svg(), algebra, rank=3),
        "show a plan": Door(lambda what, width, height: axes.show(what).text(width, height), plan, 80, 24),
        "CostModel": Door(
            lambda **model: axes.plan("b@dp d@tp", "b d", (8, 8), mesh=algebra, cost_model=axes.CostModel(**model)).cost,
            latency_us=10.0,
            intra_node_gbps=100.0,
            inter_node_gbps=20.0,
            memory_gbps=1000.0,
            ranks_per_node=4,
        ),
        # rules
        "Rules": Door(lambda *a, **k: axes.Rules(*a, **k).spec("b d", algebra, (8, 8)), {"b": ("dp",), "d": "tp"}, h=None, k="dp"),
        "Rules of pairs": Door(axes.Rules, [("b", ("dp", "tp")), ("d", None)]),
        "Rules.spec": Door(rules.spec, "b (h d)", algebra, (8, 8), sizes={"h": 2}, sized=True),
        "Rules.explain": Door(rules.explain, "b (h d)", algebra, (8, 8), sizes={"h": 2}, sized=True),
        "use_rules": Door(lambda rules: entered(axes.use_rules(rules)), rules),
        "constrain": Door(axes.constrain, x, "b d", mesh=mesh, rules=rules, sized=True),
        # sharded tensors
        "shard": Door(axes.shard, plain, "b@dp (h@tp k)", source_rank=None, sizes={"h": 8}, sized=True, **ends),
        "shard from a rank": Door(axes.shard, plain, "b@dp d@tp", source_rank=0, sized=True, **ends),
        "from_local": Door(axes.from_local, plain, "b@dp d@tp", shape=(8 * dp, 8 * tp), grad=None, sizes=None, sized=True, **ends),
        "from_local pending": Door(axes.from_local, plain, "b d | sum@tp", grad="whole", sizes=None, sized=True, **ends),
        "unshard": Door(axes.unshard, x),
        "to_local": Door(axes.to_local, x, "b@dp d@tp", "whole"),
        "spec_of": Door(axes.spec_of, x),
        "sharding_of": Door(axes.sharding_of, x),
        "zeros": Door(axes.zeros, "b@dp d@tp", sized=True, **made),
        "ones": Door(axes.ones, "b@dp d@tp", sized=True, **made),
        "full": Door(axes.full, "b@dp d@tp", 1.5, sized=True, **made),
        "empty": Door(axes.empty, "b@dp d@tp", sized=True, **made),
        "rand": Door(axes.rand, "b@dp d@tp", sized=True, **made),
        "randn": Door(axes.randn, "b@dp d@tp", sized=True, **made),
        # operations
        "rearrange": Door(axes.rearrange, x, "b@dp (h k)@tp -> b@dp h@tp k", h=8, sized=True, **moves),
        "rearrange a shard": Door(axes.rearrange, plain, "b@dp (h k) -> b@dp k h", h=2, sized=True, **moves),
        "rearrange by einops": Door(axes.rearrange, plain, "b (h k) -> h b k", h=2, sized=True),
        "reduce": Door(axes.reduce, x, "b@dp d@tp -> b@dp", "sum", sized=True, **moves),
        "reduce a shard": Door(axes.reduce, plain, "b@dp d@tp -> b@dp", "max", sized=True, **moves),
        "reduce by einops": Door(axes.reduce, plain, "b (h 2) -> b h", "mean", sized=True),
        "repeat": Door(axes.repeat, rows, "b@dp d -> b@dp n d", n=3, sized=True, **moves),
        "repeat by einops": Door(axes.repeat, plain, "b d -> b n d", n=3, sized=True),
        "einsum": Door(axes.einsum, x, columns, "b@dp d@tp, c d@tp -> b@dp c", sized=True, **moves),
        "einsum of shards": Door(axes.einsum, plain, plain, "b d@tp, d@tp f -> b f", sizes={}, sized=True, **moves),
        "reshard": Door(axes.reshard, x, "b (h@tp k)", h=8, sized=True, **moves),
        "reshard what is pending": Door(axes.reshard, pending, "b@* d@tp |", sized=True, **moves),
        "reshard to a sharding": Door(axes.reshard, x, mesh.sharding("b d@(tp dp)"), **moves),
        "reshard of many": Door(lambda x, s, **k: [axes.spec_of(y) for y in axes.reshard({"x": x, "y": pending}, {"x": s, "y": "b d"}, **k).values()], x, "b d@tp", mesh=None),
        "reshard a shard": Door(axes.reshard, plain, "b@dp d -> b d", sized=True, **moves),
        "shard_map": Door(axes.shard_map, lambda x: x, "b@dp d -> b@dp d", mesh=mesh, check=False),
        "shard_map, called": Door(mapped, "b@dp d@tp, b@dp d -> b@dp d@tp", x, rows, mesh=mesh, check=False),
        "shard_map, decorated": Door(decorated, "b@dp d@tp -> b@dp d@tp", x, mesh=mesh),
        "shard_map of a module": Door(lambda *a, **k: axes.shard_map(*a, **k), Fresh(model), "b@dp d -> b@dp d", mesh=mesh),
        "a region": Door(region, x),
        "psum": Door(axes.psum, plain, ("dp", "tp"), **ends),
        "pmean": Door(axes.pmean, plain, "tp", **ends),
        "pmax": Door(axes.pmax, plain, "tp", **ends),
        "pmin": Door(axes.pmin, plain, "all", **ends),
        "all_gather": Door(axes.all_gather, plain, "tp", 1, **ends),
        "psum_scatter": Door(axes.psum_scatter, plain, "tp", 1, **ends),
        "all_to_all": Door(axes.all_to_all, plain, "tp", 0, 1, **ends),
        "all_to_all by sizes": Door(axes.all_to_all, plain, "tp", send_sizes=[8 // tp] * tp, recv_sizes=[8 // tp] * tp, **ends),
        "ppermute": Door(axes.ppermute, plain, "tp", shift=1, **ends),
        "ppermute by pairs": Door(axes.ppermute, plain, "tp", perm=[(i, (i + 1) % tp) for i in range(tp)], **ends),
        "axis_index": Door(axes.axis_index, "tp", **ends),
        "axis_size": Door(axes.axis_size, ("dp", "tp"), **ends),
        "debug": Door(lambda check: entered(axes.debug(check)) and None, True),
        "process_groups": Door(lambda *a: type(axes.process_groups(*a)).__name__),
        "destroy_process_groups": Door(lambda *wrong: axes.destroy_process_groups(*wrong or (None,)), None),
        "simulate": Door(lambda *a, **k: entered(axes.simulate(*a, **k)), 8, rank=3),
        "connect": Door(axes.connect, torch.distributed.HashStore(), "trainer", algebra, peers=("trainer", "generator"), timeout=0.2),
        # models
        "annotate": Door(axes.annotate, Fresh(lambda: nn.Parameter(_whole(8, 8))), "d f"),
        "annotate a module": Door(axes.annotate, Fresh(model), {"up.weight": "f d", "norm.weight": "f"}),
        "shard_module": Door(axes.shard_module, Fresh(model), {"up.*": "f@tp d", "*": "..."}, mesh, rules=None, dry_run=False, sizes=None, sized=True),
        "shard_module by rules": Door(axes.shard_module, Fresh(model), {"up.*": "(d h) b", "*": "d"}, {"*": mesh}, rules=rules, h=4, sized=True),
        "softmax": Door(axes.softmax, x, "b@dp d@tp", over="d", **ends),
        "softmax of a shard": Door(axes.softmax, plain, "b@dp d@tp", over="d", **ends),
        "logsumexp": Door(axes.logsumexp, x, "b@dp d@tp", over=["d"], **ends),
        "log_softmax": Door(axes.log_softmax, x, "b@dp d@tp", over=["d"], **ends),
        "entropy": Door(axes.entropy, plain, "b@dp d@tp", over="d", **ends),
        "argmax": Door(axes.argmax, x, "b@dp d@tp", over="d", sized=True, **ends),
        "topk": Door(axes.topk, x, "b@dp d@tp", 2, over="d", sized=True, **ends),
        "topk of a shard": Door(axes.topk, plain, "b d@tp", 2, over="d", sized=True, **ends),
        "sample": Door(axes.nn.sample, x, "b@dp d@tp", over="d", temperature=0.5, seed=3, sized=True, **ends),
        "sample of a shard": Door(axes.nn.sample, plain, "b d@tp", over="d", seed=3, sized=True, **ends),
        "cross_entropy": Door(axes.cross_entropy, x, ids, "b@dp d@tp, b@dp ->", reduction="mean", ignore_index=-100, label_smoothing=0.1, z_loss=1e-4, sized=True, **ends),
        "cross_entropy with weights": Door(axes.cross_entropy, plain, labels, "b v, b ->", weight=torch.ones(8), sized=True, **ends),
        "cross_entropy of shards": Door(axes.cross_entropy, plain, labels, "b v@tp, b ->", sized=True, **ends),
        "embedding": Door(axes.embedding, ids, axes.shard(plain, "v@tp e", mesh=mesh), "b@dp, v@tp e -> b@dp e", padding_idx=1, sized=True, **ends),
        "embedding of shards": Door(axes.embedding, labels, plain, "b, v@tp e -> b e", padding_idx=-1, sized=True, **ends),
        "rms_norm": Door(axes.rms_norm, x, "b@dp d@tp", over="d", weight=None, eps=1e-5, sized=True, **ends),
        "layer_norm": Door(axes.layer_norm, plain, "b d", over="d", weight=torch.ones(8), bias=torch.zeros(8), eps=1e-5, sized=True, **ends),
        "Einsum": Door(module(axes.nn.Einsum, (_whole(4, 8),)), "b d, f d -> b f", device=None, dtype=torch.float32, d=8, f=6, sized=True),
        "Embedding": Door(module(axes.nn.Embedding, (labels,)), "b, v e -> b e", padding_idx=2, device="cpu", dtype=None, v=10, e=4, sized=True),
        "RMSNorm": Door(module(axes.nn.RMSNorm, (plain,)), "b d", over="d", eps=1e-5, device=None, dtype=None, d=8, sized=True),
        "LayerNorm": Door(module(axes.nn.LayerNorm, (plain,)), "b d", over="d", eps=1e-5, bias=True, device=None, dtype=None, d=8, sized=True),
        "Dropout": Door(module(axes.nn.Dropout, (plain,)), 0.5, "b d", sized=True),
        "dropout": Door(axes.nn.dropout, x, 0.5, "b@dp d@tp", training=True, seed=3, sizes=None, sized=True, **ends),
        "Einsum, called": Door(axes.nn.Einsum("b d, f d -> b f", d=8, f=6), plain),
        "Einsum of halves, called": Door(axes.nn.Einsum("... d, f d -> ... f", d=8, f=6), plain),
        "Embedding, called": Door(axes.nn.Embedding("b, v e -> b e", v=10, e=4), labels),
        "RMSNorm, called": Door(axes.nn.RMSNorm("b d", over="d", d=8), plain),
        "clip_grad_norm_": Door(axes.nn.clip_grad_norm_, Fresh(with_gradients), 1.0, 2.0, False, stages=(), copies=(), **ends),
        "local_optimizer": Door(stepped, torch.optim.SGD, Fresh(with_gradients), lr=0.1),
        "load_safetensors": Door(axes.nn.load_safetensors, Fresh(model), weights(), names={"up.weight": "up.weight"}, ignore=("*.inv",)),
    }  # fmt: skip


def foreign_to(mesh: axes.Mesh) -> list[Any]:
    """Tensors, meshes and shardings that are right elsewhere: of other meshes, shapes and pending states."""
    other = axes.init_mesh("all", device_type="cpu")
    renamed = axes.init_mesh("u v", device_type="cpu", v=mesh.shape["tp"])
    plain = _whole(8, 8)
    pending = axes.from_local(plain, "b d | sum@tp", mesh=mesh)
    return [
        mesh, mesh["tp"], mesh["tp", "dp"], mesh.at(0), mesh["rep"], other, renamed, axes.Mesh("dp=2 tp=4"),
        axes.Mesh("a=6"), axes.shard(plain, "b@all d", mesh=other), axes.shard(plain, "b@u d@v", mesh=renamed), pending,
        axes.from_local(plain, "b d | max@tp", mesh=mesh), axes.from_local(plain, "b d | mean@dp", mesh=mesh),
        axes.shard(plain, "b@tp d", mesh=mesh["tp"]), axes.shard(_whole(3, 5), "b@dp d@tp", mesh=mesh),
        axes.shard(plain, "b@(dp tp) d", mesh=mesh), axes.shard(_whole(4), "b", mesh=mesh),
        axes.shard(torch.tensor(3.0), "", mesh=mesh), axes.shard(plain, "b@dp d@tp", mesh=mesh).requires_grad_(),
        axes.shard(plain.to(torch.complex64), "b@dp d@tp", mesh=mesh), axes.shard(torch.arange(8), "b@dp", mesh=mesh),
        axes.shard(plain > 1, "b@dp d@tp", mesh=mesh),
        axes.shard(_whole(8, 24), "b@dp (three h@tp)", mesh=mesh, three=3),
        axes.shard(torch.zeros(0, 8), "b@dp d", mesh=mesh), mesh.sharding("b@dp d@tp"), renamed.sharding("b@u d"),
        axes.Mesh("q=7").sharding("b@q"), mesh.device_mesh, other.device_mesh, mesh.layout("tp"),
    ]  # fmt: skip


WORLDS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "one": lambda: axes.simulate(1),
    "eight": lambda: axes.simulate(8, rank=5),
}


@contextmanager
def world(name: str) -> Iterator[axes.Mesh]:
    """A simulated world by name, and its mesh."""
    with WORLDS[name]():
        yield axes.init_mesh("dp tp", "all = dp tp", "(tp) = kv rep", device_type="cpu", **SIZES[name])


SIZES = {"one": {"tp": 1, "kv": 1}, "eight": {"tp": 4, "kv": 2}}
