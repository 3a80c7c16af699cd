"""einops with an `@`: on plain tensors it is einops, and fifty-four expressions decide what the rest means.

Rows of the table are run on eight ranks, on DTensors with the shardings given (D), on plain tensors (L), or on both: the
result and its sharding, how many collectives are sent, or the error. What is right is what einops does with the whole.
"""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import einops
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes import einsum, rearrange, reduce, repeat
from tests.common import case as noted
from tests.common import numbers
from tests.flow_cases import case, stripped

IMAGES = torch.arange(6 * 12 * 8 * 3, dtype=torch.float64).reshape(6, 12, 8, 3)

# Beside what is drawn below: dots, ones, brackets around nothing, numbers, and names that stand twice in an einsum.
WHOLE = {
    "rearrange": (
        "b h w c -> b h w c",
        "b h w c -> h (b w) c",
        "(b1=2 b2) h w c -> (b2 h) (b1 w) c",
        "b (h1=2 h) (w1=2 w) c -> (b h1 w1) h w c",
        "b h w c -> b h w c 1",
        "b h w c -> 1 b () h w c",
        "b h w c -> b (1 h) w c",
        "... c -> c ...",
        "... -> (...)",
        "b ... c -> (b ...) c",
        "b h ... w c -> c ... w h b",
        "... (h1=3 h2) w c -> ... h1 (h2 w) c",
    ),
    "reduce": (
        "b h w c -> b c",
        "b h w c ->",
        "b h w c -> 1 1 1 c",
        "b h w c -> b () () c",
        "b (h1 h2=2) (w1 w2=2) c -> b h1 w1 c",
        "b (h1 2) (w1 2) c -> b h1 w1 c",
        "... c -> c",
        "b h ... -> b ...",
        "b h w c -> b h w c",
    ),
    "repeat": (
        "h w -> (repeat=2 h) w",
        "h w -> h (w repeat=3)",
        "h w -> (h2=2 h) (w3=3 w)",
        "h w -> h w 3",
        "h w -> (h 2) (2 w)",
        "... -> ... 2",
        "... w -> w ... n=1",
        "h w -> h 1 w",
        "h w -> h w",
    ),
}
# fmt: off
EINSUM = [
    ("a b c, c b d, a g k -> a b k", [(3, 3, 3)] * 3), ("out inner, ... inner -> ... out", [(5, 4), (2, 3, 4)]), ("i i ->", [(4, 4)]),
    ("i i -> i", [(4, 4)]), ("i, j -> i j", [(3,), (4,)]), ("... a, ... a -> ...", [(2, 3, 4), (2, 3, 4)]), (", a -> a", [(), (3,)]),
]
# fmt: on


def sized(pattern: str) -> tuple[str, dict[str, int]]:
    """An expression as einops has it, and the sizes that stand in it."""
    return re.sub(r"=\d+", "", pattern), {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", pattern)}


@pytest.mark.parametrize("pattern", WHOLE["rearrange"])
def test_rearrange_is_einops_rearrange(pattern: str):
    pattern, sizes = sized(pattern)
    expected = einops.rearrange(IMAGES, pattern, **sizes)
    found = rearrange(IMAGES, pattern, **sizes)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert (found.data_ptr() == IMAGES.data_ptr()) == (expected.data_ptr() == IMAGES.data_ptr())


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
def test_reduce_is_einops_reduce(op: str):
    for pattern, sizes in map(sized, WHOLE["reduce"]):
        with noted(pattern):
            expected = einops.reduce(IMAGES, pattern, op, **sizes)
            torch.testing.assert_close(reduce(IMAGES, pattern, op, **sizes), expected, rtol=0, atol=0, equal_nan=True)


def test_repeat_and_einsum_are_those_of_einops():
    for pattern, sizes in map(sized, WHOLE["repeat"]):
        image = IMAGES[0, :, :, 0]
        assert torch.equal(repeat(image, pattern, **sizes), einops.repeat(image, pattern, **sizes)), pattern
    for pattern, shapes in EINSUM:
        tensors = [torch.arange(float(np.prod(shape))).reshape(shape) for shape in shapes]
        assert torch.equal(einsum(*tensors, pattern), einops.einsum(*tensors, pattern)), pattern


def test_what_einops_takes_beside_tensors_and_what_it_has_not():
    mask, listed = IMAGES % 5 == 0, list(IMAGES)
    for op in ("any", "all"):
        assert torch.equal(reduce(mask, "b h w c -> b c", op), einops.reduce(mask, "b h w c -> b c", op))
    for pattern in ("b h w c -> h w c b", "b h w c -> (b h) w c"):
        assert torch.equal(rearrange(listed, pattern), einops.rearrange(listed, pattern))
    assert torch.equal(reduce(listed, "b h w c -> h w c", "mean"), IMAGES.mean(0))
    found = reduce(IMAGES, "b (h 2) w c -> b h c", torch.logsumexp)
    assert torch.equal(found, einops.reduce(IMAGES, "b (h 2) w c -> b h c", torch.logsumexp))
    x = torch.arange(12)
    assert rearrange(x, "(x expression) -> expression x", x=3).shape == (4, 3)
    assert rearrange(x, "(mesh op) -> op mesh", sizes={"mesh": 3}).shape == (4, 3)
    assert torch.equal(rearrange(IMAGES, "(b1=2 b2) h w c | * -> b1 (b2 h w c)"), IMAGES.view(2, -1))
    assert torch.equal(repeat(IMAGES, "b h w c -> b (h n=2) w c |"), IMAGES.repeat_interleave(2, 1))
    y, w = torch.randn(4, 6), torch.randn(6, 10)
    assert torch.allclose(einsum(y, w, "b k, k (h d) -> b h d", h=5), (y @ w).reshape(4, 5, 2))
    assert einsum(torch.arange(4.0), "(i i) ->", i=2) == 0 + 3  # a trace, not the sum of a group


# --- one language: a model runs with the same text on one device and sharded


NAMES = ["_h", "h_", "__", "_1", "β", "größe", "h2", "\u540d", "नाम", "lambda", "sum", "self", "mesh", "a" * 40]


SPACES = [" ", "  ", "\t", "\n", "\r\n", "\u00a0", " \u3000"]


SIGNS = [*"@|,=()*+.-><~_2é²\x00", "...", "1", "()", " 3 ", "(2 ", " _ ", "µ", " -> "]


def spelled(any_of: random.Random, text: str, sizes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text with other names and other white space."""
    names = dict(zip("abcdefg", any_of.sample(NAMES, 7), strict=True))

    def anew(found: re.Match[str]) -> str:
        return any_of.choice(SPACES) if found[0].isspace() else names.get(found[0], found[0])

    return re.sub(r"@\w+|\b[a-g]\b|\s+", anew, text), {names.get(name, name): size for name, size in sizes.items()}


def mistaken(
    any_of: random.Random, text: str, sizes: dict[str, Any], xs: list[torch.Tensor]
) -> tuple[str, dict[str, Any], list[torch.Tensor]]:
    """A call with a mistake, as people make them."""
    what, at = any_of.randrange(6), any_of.randrange(len(text))
    if what == 0:
        text = text.replace("->", any_of.choice([" ", "- >", f"-> {text} ->", "-> h"]))
    elif what == 1:
        text = text[:at] + any_of.choice(["", *SIGNS]) + text[at + any_of.randrange(2) :]
    elif what == 2:
        text = re.sub(r"\b[a-g]\b", any_of.choice("abcdefgh"), text, count=1)
    elif what == 3:
        sizes = {name: size for name, size in sizes.items() if any_of.random() < 0.7}
    elif what == 4:
        sizes = {**sizes, any_of.choice([*sizes, "h"]): any_of.choice([0, 1, 2, 3, 7, -1, -3, 1.5, True, "x", None])}
    else:
        xs = [xs[0][None], *xs[1:]] if any_of.random() < 0.5 or not xs[0].ndim else [torch.cat([xs[0]] * 2), *xs[1:]]
    return text, sizes, xs


def outcome(kind: str, *arguments: Any, **options: Any) -> str | torch.Tensor:
    try:
        found = getattr(axes, kind)(*arguments, **options)
    except axes.AxesError as error:
        kinds = (axes.ExpressionError, axes.SizeError, axes.MeshError, axes.ShardingError)
        return next(kind.__name__ for kind in kinds if isinstance(error, kind))
    return axes.unshard(found) if isinstance(found, DTensor) else found


def agree(one: str | torch.Tensor, other: str | torch.Tensor) -> bool:
    return one == other if isinstance(one, str) or isinstance(other, str) else one.equal(other)


@pytest.mark.parametrize("seed", range(4))
def test_one_text_is_the_same_or_the_same_mistake_on_plain_tensors_shards_and_dtensors(seed: int):
    any_of = random.Random(seed)
    with axes.simulate(1), axes.init_mesh("tp=1", device_type="cpu") as mesh:
        for _ in range(150):
            found = case(any_of, mesh=axes.Mesh("tp=1"))
            text, sizes, xs, right = stripped(found.text), found.given, [*found.wholes], any_of.random() < 0.4
            if not right:
                text, sizes, xs = mistaken(any_of, text, sizes, xs)
            named = re.sub(rf"\b{any_of.choice('abcdefg')}\b", r"\g<0>@tp", text)
            names = any_of.random()
            op = (found.op,) if found.kind == "reduce" else ()
            whole = [axes.shard(x, " ".join("_" * x.ndim), mesh=mesh) for x in xs]
            for written in (text, named):
                said, given = spelled(random.Random(names), written, sizes)
                here, there = (outcome(found.kind, *each, said, *op, mesh=mesh, sizes=given) for each in (xs, whole))
                assert agree(here, there), (found.kind, said, op, given, [x.shape for x in xs], here, there)
                if right and written == text:
                    assert agree(here, found.expected()), (found, here)


# --- shards of which nothing is sent: the same, with this rank's sizes


class Captured:
    """What a function holds on to."""


@pytest.mark.parametrize("kind", ["plain", "shards", "DTensors"])
def test_a_function_that_reduces_is_not_kept_and_each_gives_its_own(kind: str):
    text = "a b -> a" if kind == "plain" else "a@tp b -> a@tp"
    with axes.simulate(2), axes.init_mesh("tp=2", device_type="cpu"):
        x = axes.shard(torch.ones(4, 3), "a@tp b") if kind == "DTensors" else torch.ones(2, 3)
        for scale in (1, 2):
            captured = Captured()
            alive = weakref.ref(captured)
            leaf = x.detach().clone().requires_grad_()
            y = axes.reduce(leaf, text, lambda x, dims, kept=captured, by=scale: (kept, by * x.sum(dims))[1])
            y.sum().backward()
            assert (y if kind != "DTensors" else y.to_local()).tolist() == [3.0 * scale] * 2
            del captured, y
            gc.collect()
            assert alive() is None


# --- the table

SHAPE = (8, 16, 32)


@dataclass(frozen=True)
class Row:
    """One line of the table. `specs` and `shapes` are of the whole operands."""

    number: int | str
    text: str
    specs: Sequence[str]
    shapes: Sequence[tuple[int, ...]] = (SHAPE,)
    kind: str = "rearrange"
    op: Any = "sum"
    result: str | None = None
    collectives: Sequence[str] = ()
    error: str | None = None
    views: str = "DL"
    sizes: Sequence[tuple[str, int]] = ()
    mesh: str = "dp=2 cp=2 tp=2"


def row(number: int | str, text: str, *specs: str, **fields: object) -> Row:
    return Row(number, text, specs, **fields)  # type: ignore[arg-type]


def einsum_row(number: int | str, text: str, *specs: str, **fields: object) -> Row:
    sizes = {"b": 8, "s": 16, "d": 32, "f": 64, "c": 4, "i": 6, "j": 6}
    names = [[word.split("@")[0] for word in spec.split("|")[0].split()] for spec in text.split("->")[0].split(",")]
    shapes = [tuple(sizes[name] for name in each) for each in names]
    return Row(number, text, specs, shapes, "einsum", **fields)  # type: ignore[arg-type]


# fmt: off
TABLE = [
    row(1, "b s@tp d -> b s d", "b@dp s@tp d", result="b@dp s d", collectives=["all_gather tp"], views="D"),
    row(1, "b s@tp d -> b s d", "b s@tp d", result="b s d", collectives=["all_gather tp"]),
    row(2, "b s@tp d -> b s d", "b s@tp d | sum@dp", result="b s d | sum@dp", collectives=["all_gather tp"], views="D"),
    row(3, "b s@tp d -> b s d", "b s@(cp tp) d", error="says  b s@tp d\n  has   b s@\\(cp tp\\) d", views="D"),
    row(4, "b s d -> b s@tp d", "b s d@tp", error="'tp' would split 's' and 'd'.*write 'd@tp' on the left", views="D"),
    row(5, "b s d -> b s@tp d", "b s d | sum@tp", error="says  b s d\n  has   b s d | sum@tp", views="D"),
    row(6, "b s@cp d -> b s@(cp tp) d", "b s@cp d", result="b s@(cp tp) d"),
    row(7, "b s@(cp tp) d -> b s@cp d", "b s@(cp tp) d", result="b s@cp d", collectives=["all_gather tp"]),
    row(8, "b s@(cp tp) d -> b s@tp d", "b s@(cp tp) d", result="b s@tp d", collectives=["all_to_all cptp"]),
    row(9, "b s@(cp tp) h -> b s@cp h@tp", "b s@(cp tp) h", result="b s@cp h@tp", collectives=["all_to_all tp"]),
    row(10, "b s@(cp tp) h -> b s@tp h@cp", "b s@(cp tp) h", result="b s@tp h@cp", collectives=["all_to_all cptp"]),
    row(11, "b s@(cp tp) d -> b s@(tp cp) d", "b s@(cp tp) d", result="b s@(tp cp) d", collectives=["permute cptp"]),
    row(12, "b s@cptp d -> b s d@tp", "b s@(cp tp) d", result="b s d@tp", collectives=["all_to_all cptp"]),
    row(13, "b d | sum@cptp -> b d | sum@cp", "b d | sum@cptp", shapes=[(8, 32)], result="b d | sum@cp", collectives=["all_reduce tp"]),
    row(14, "b s@cp (h d) -> b s h@cp d", "b s@cp (h@tp d)", sizes=[("h", 8)], error="says  b s@cp \\(h d\\)\n  has   b s@cp \\(h@tp d\\)", views="D"),
    row(15, "b s@cp (h d) -> b s h@(* cp) d", "b s@cp (h@tp d)", sizes=[("h", 8)], result="b s h@(tp cp) d", collectives=["all_to_all cp"], views="D"),
    row(15, "b s@cp (h d) -> b s h@(* cp) d", "b s@cp (h d)", sizes=[("h", 8)], result="b s h@cp d", collectives=["all_to_all cp"]),
    row(16, "(b s)@tp d -> b s d", "bs@tp d", shapes=[(12, 32)], sizes=[("b", 4)], result="b s d", collectives=["all_gather tp"]),
    row(16, "(b s)@tp d -> b s d", "bs@tp d", shapes=[(12, 32)], sizes=[("b", 3)], error="don't fall on its names: \\(b=3 s=4\\)"),
    row(17, "(b s)@tp d -> b@tp s d", "bs@tp d", shapes=[(12, 32)], sizes=[("b", 4)], result="b@tp s d"),
    row(18, "(b@tp s) d -> b s d", "bs@tp d", shapes=[(12, 32)], sizes=[("b", 4)], result="b s d", collectives=["all_gather tp"]),
    row(19, "(h@tp d)@dp e -> h d e", "(h d) e", shapes=[(32, 4)], error="'@' inside or outside, not both"),
    row(20, "b (s p) -> b s p", "b sp@tp", shapes=[(8, 12)], sizes=[("s", 4)], result="b s@tp p", views="D"),
    row(20, "b (s p) -> b s p", "b sp@tp", shapes=[(8, 12)], sizes=[("s", 3)], error="don't fall on its names: \\(s=3 p=4\\)", views="D"),
    row(21, "b s (h@(tp cp) d) -> b s h@(tp cp) d", "b s (h@(tp cp) d)", sizes=[("h", 8)], result="b s h@(tp cp) d"),
    row(21, "b s (h (k d)) -> b s h k d", "b s hd", sizes=[("h", 8)], error="groups don't nest"),
    row(22, "b s@cp d -> b d", "b s@cp d", kind="reduce", result="b d", collectives=["all_reduce cp"]),
    row(23, "b s d -> b d", "b s@cp d", kind="reduce", error="left pending: sum@cp.*write 's@cp' on the left.*'| \\*' on the right", views="D"),
    row(24, "b s d -> b d", "b s d", kind="reduce", result="b d"),
    row(25, "b s@cp d -> b d | mean@cp", "b s@cp d", kind="reduce", op="mean", result="b d | mean@cp", views="D"),
    row(25, "b s@cp d -> b d | mean@cp", "b s@cp d", sizes=[("s", SHAPE[1])], kind="reduce", op="mean", result="b d | mean@cp"),
    *[row(25, f"b s@cp d -> b d | {pending}", "b s@cp d", kind="reduce", op="mean", error="stays pending.* needs the whole size of 's'.*give it as a keyword: s=", views="L") for pending in ("mean@cp", "sum@cp", "*")],
    row(26, "b s@cp d -> b d | mean@cp", "b s@cp d", shapes=[(8, 5, 32)], sizes=[("s", 5)], kind="reduce", op="mean", error="write '| sum@cp' on the right"),
    row(26, "b s@cp d -> b d | sum@cp", "b s@cp d", shapes=[(8, 5, 32)], sizes=[("s", 5)], kind="reduce", op="mean", result="b d | sum@cp"),
    row(27, "b s d | sum@tp -> b s", "b s d | sum@tp", kind="reduce", op="max", error="'max' doesn't pass a pending sum"),
    row(28, "b s@cp -> b", "b s@cp", shapes=[(8, 1)], sizes=[("s", 1)], kind="reduce", op="max", result="b", collectives=["all_reduce cp"]),
    row(29, "b s@cp -> b", "b s@cp", shapes=[(8, 16)], kind="reduce", op=max, error=r"'max\(\)' doesn't reduce across ranks"),
    row(30, "b (h 2) -> b h", "b h2", shapes=[(8, 6)], kind="reduce", op="mean", result="b h"),
    row(31, "b d -> b n@tp d", "b d", shapes=[(8, 32)], sizes=[("n", 4)], kind="repeat", result="b n@tp d"),
    einsum_row(32, "b s d, d f@tp -> b s f@tp", "b s d", "d f@tp", result="b s f@tp"),
    einsum_row(32, "b s d, d f@tp -> b s f@tp", "b@dp s@cp d", "d f@tp", result="b@dp s@cp f@tp", views="D"),
    einsum_row(33, "b s f@tp, f@tp d -> b s@tp d", "b s f@tp", "f@tp d", result="b s@tp d", collectives=["reduce_scatter tp"]),
    einsum_row(34, "b s f@tp, f d -> b s d", "b s f@tp", "f d", error="disagree on 'f': 'f@tp' and 'f'.*axes.reshard operand 2 to 'f@tp d'"),
    einsum_row(35, "b s d, d f@tp -> b s f", "b s d", "d f@tp", result="b s f", collectives=["all_gather tp"]),
    einsum_row(36, "b s f, f d -> b s d", "b s f@tp", "f@tp d", error="left pending: sum@tp.*'f@tp' on the left.*'| \\*' on the right", views="D"),
    einsum_row(37, "b s f, f d -> b s d | *", "b s f@tp", "f@tp d", result="b s d | sum@tp", views="D"),
    einsum_row(38, "b f@tp, f@tp d, c -> b d c", "b f@tp", "f@tp d", "c@tp", error="'tp' splits 'f' and splits 'c'", views="D"),
    einsum_row(39, "b d | sum@tp, d f -> b f | sum@tp", "b d | sum@tp", "d f", result="b f | sum@tp"),
    einsum_row(40, "b d | sum@tp, d f | sum@tp -> b f", "b d | sum@tp", "d f | sum@tp", error="'tp' is pending in operand 1 and is pending in operand 2"),
    einsum_row(41, "b f@tp, f d | sum@tp -> b d", "b f@tp", "f d | sum@tp", error="'tp' splits 'f' and is pending in operand 2"),
    einsum_row(42, "i@tp i -> i@tp", "i@tp j", error="a diagonal needs 'i' unsplit"),
    einsum_row(43, "b d | sum@tp, b d | mean@tp -> b d", "b d | sum@tp", "b d | mean@tp", error="'tp' is pending in operand 1 and is pending in operand 2"),
    einsum_row("47a", "b s f@*, f@* d -> b s d", "b s f@tp", "f@tp d", result="b s d", collectives=["all_reduce tp"], views="D"),
    einsum_row("47a", "b s f@*, f@* d -> b s d", "b@dp s f", "f d", result="b@dp s d", views="D"),
    einsum_row("47a", "b s f@*, f@* d -> b s d", "b s f@tp", "f@tp d", error="doesn't say what splits 'f'", views="L"),
    einsum_row("47a", "b s f@*, f@* d -> b s d", "b s f@tp", "f d", error="disagree on 'f': 'f@tp' and 'f'", views="D"),
    einsum_row("47b", "b s f@*, f@* d -> b s@(* tp) d", "b s@cp f@tp", "f@tp d", result="b s@(cp tp) d", collectives=["reduce_scatter tp"], views="D"),
    row("47c", "b s h@* -> b s", "b@dp s h@tp", kind="reduce", op="mean", shapes=[(8, 16, 5)], result="b@dp s", collectives=["all_reduce tp"], views="D"),
    row("47c", "b@* s h@* -> b", "b@dp s@cp h@tp", kind="reduce", error="left pending: sum@cp", views="D"),
    row(44, "... d@tp -> ... d", "b@dp s d@tp", result="b@dp s d", collectives=["all_gather tp"], views="D"),
    row(44, "... d@tp -> ... d", "b s d@tp", result="b s d", collectives=["all_gather tp"]),
    row(49, "b@cp s@cp -> b s", "b s", shapes=[(8, 16)], error="'cp' is used twice"),
    row(49, "b@cp s@cp -> b s", "b s", shapes=[(8, 16)], error="'cp' is used twice", mesh="dp=4 cp=1 tp=2"),
    row(50, "b s@cp d -> b s d", "b s d", result="b s d", mesh="dp=4 cp=1 tp=2"),
]
# fmt: on


def operand(mesh: axes.Mesh, spec: str, shape: tuple[int, ...], view: str, line: Row, seed: int) -> torch.Tensor:
    """What a rank has; of what is pending as a sum every rank has the same share."""
    before, _, pending = spec.partition("|")
    named = {name: size for name, size in line.sizes if f"({name}" in before}
    whole = axes.to_local(axes.shard(numbers(*shape, seed=seed), before, mesh=mesh, sizes=named)).clone()
    for name in re.findall(r"\w+", pending)[1:] if "sum" in pending else ():
        whole /= mesh.names[name]
    return axes.from_local(whole, spec, mesh=mesh, shape=shape, sizes=named) if view == "D" else whole


def plain(text: str) -> str:
    return re.sub(r"@(\([^)]*\)|[\w*]+)|\|[^>,]*(?=->|,)|\|.*$", "", text)


def run(number: int, view: str) -> str | None:
    """The error, where there is one; else what is right is asserted."""
    line = TABLE[number]
    mesh = axes.init_mesh(line.mesh, "cptp = cp tp", device_type="cpu")
    xs = [operand(mesh, s, n, view, line, at) for at, (s, n) in enumerate(zip(line.specs, line.shapes, strict=True))]
    with CommDebugMode() as sent:
        op = (line.op,) if line.kind == "reduce" else ()
        try:
            found = getattr(axes, line.kind)(*xs, line.text, *op, mesh=mesh, sizes=dict(line.sizes))
        except axes.AxesError as error:
            return str(error)
    assert sent.get_total_counts() == len(line.collectives), sent.get_comm_counts()
    wholes = [numbers(*shape, seed=at) for at, shape in enumerate(line.shapes)]
    text = plain(line.text)
    sizes = (
        {name: size for name, size in line.sizes if re.search(rf"\b{name}\b", text)}
        if "(" in text or line.kind == "repeat"
        else {}
    )
    theirs = getattr(einops, line.kind)
    expected = theirs(*wholes, text) if line.kind == "einsum" else theirs(*wholes, text, *op, **sizes)
    promised = mesh.sharding(line.result)
    assert (found.to_local() if view == "D" else found).shape == promised.local_shape(expected.shape)
    found = found if view == "D" else axes.from_local(found, line.result, mesh=mesh, shape=expected.shape)
    assert axes.sharding_of(found).is_equivalent(promised, expected.shape)
    torch.testing.assert_close(axes.unshard(found), expected)
    return None


CASES = [(number, view) for number, line in enumerate(TABLE) for view in line.views]


@pytest.mark.parametrize(
    ("number", "view"), CASES, ids=[f"{TABLE[n].number}{view} {TABLE[n].text}" for n, view in CASES]
)
def test_the_table_of_expressions_holds(pool, number: int, view: str):
    error = TABLE[number].error
    for found in pool.run(run, number, view):
        assert (found is None) == (error is None), found
        assert error is None or re.search(f"(?s){error}", found), found


RESHARDED = [
    (45, "b@* s@tp d", "b@dp s@cp d", "_@dp _@tp _"),
    (45, "b s@tp d", "b@dp s@cp d", "_ _@tp _"),
    (46, "b s d@tp", "b s@tp d", "_ _ _@tp"),
    (47, "b s d", "b s@cp d | sum@tp", "_ _ _"),
    (47, "b s d | *", "b s@cp d | sum@tp", "_ _ _ | sum@tp"),
]


def test_the_rows_about_reshard_regions_and_mixtures_hold():
    with axes.simulate(8), axes.init_mesh("dp=2 cp=2 tp=2", device_type="cpu") as mesh:

        def made(spec: str) -> DTensor:
            return axes.from_local(torch.zeros(mesh.sharding(spec).local_shape(SHAPE)), spec, shape=SHAPE)

        for _, spec, has, becomes in RESHARDED:
            assert axes.spec_of(axes.reshard(made(has), spec)) == becomes
        seen: list[torch.Size] = []
        y = axes.shard_map(lambda local: seen.append(local.shape) or local, "b s d -> b s d")(made("b@dp s d"))
        assert (seen, axes.spec_of(y)) == ([torch.Size((4, 16, 32))], "_@dp _ _")
        mixed = made("b s d"), torch.zeros(SHAPE)
        for call in (lambda: einsum(*mixed, "b s d, b s d -> b"), lambda: rearrange([*mixed], "n b s d -> b s d n")):
            with pytest.raises(axes.ShardingError, match="DTensors or plain tensors, not both"):
                call()
