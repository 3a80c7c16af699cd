"""Expressions with blocks: a dim that holds several tensors, one behind the other.

`"(h k + g k + g k) d -> h k d, g k d, g k d"` takes a fused projection apart. It is three expressions, one for each
block, between tensors that are cut out of the fused one:

>>> expression = read_blocks("(h k + g k + g k) d -> h k d, g k d, g k d")
>>> expression.pairs
(('(h k) d', 'h k d'), ('(g k) d', 'g k d'), ('(g k) d', 'g k d'))

The blocks of the left side, in their order, become those of the right side. What stands beside the blocks in a group
is opened before the cut: of `(g (r q + k)) d` the tensor that is cut has the dims `g blocks d`.

The notation is that of einx.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from axes.algebra import grammar
from axes.algebra.errors import ExpressionError, SizeError
from axes.algebra.grammar import Dim, Factor, Place, Spec
from axes.algebra.sizes import given_sizes

PiecesOf = Mapping[str, int]
"""By axis, into how many pieces it splits a dim of a plain tensor; an axis that isn't listed splits nothing."""


@dataclass(frozen=True)
class Fused:
    """A tensor of which one dim holds blocks.

    spec: the tensor, the blocks as one name. opened: the same with that name as a dim of its own.
    dim: the number of this dim in `opened`, from the end where `...` stands before it.
    at: the number of the dim in `spec`, in the same way.
    parts: for each block, the tensor that is cut out of `opened`. name: what stands for the blocks.
    """

    spec: str
    opened: str
    dim: int
    at: int
    parts: tuple[str, ...]
    tree: Spec = field(repr=False)
    name: str

    @property
    def needed(self) -> tuple[int, ...]:
        """The dims of `spec` whose sizes say how large the blocks are."""
        count = len(self.tree.dims)
        inside = {factor.name for factor in leaves_of(self.tree.dims[self.at].factors)}
        dots = [at for at, dim in enumerate(self.tree.dims) if any(f.name == "..." for f in dim.factors)]
        alone = [
            at - count if dots and at > dots[0] else at
            for at, dim in enumerate(self.tree.dims)
            if len(dim.factors) == 1 and dim.factors[0].name in inside and dim.factors[0].name is not None
        ]
        return (self.at, *alone)

    @property
    def is_open(self) -> bool:
        """Whether the blocks are a dim of their own, which no axis splits as a whole."""
        return self.spec == self.opened


@dataclass(frozen=True)
class BlocksExpression:
    """An expression of which a tensor holds blocks; a side is a tuple of tensors."""

    text: str
    left: tuple[Fused | str, ...]
    right: tuple[Fused | str, ...]

    @functools.cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """What each block is, and becomes."""
        return tuple(zip(_parts(self.left), _parts(self.right), strict=True))

    @functools.cached_property
    def factors(self) -> tuple[Factor, ...]:
        """Every name where it stands, with its size where that is written."""
        dims = [dim for side in _trees(self.text) for spec in side for dim in spec.dims]
        return tuple([factor for dim in dims for factor in leaves_of(dim.factors) if factor.name not in (None, "...")])

    def given(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes that are given, and those in the text; `SizeError` for another name, or two sizes of one."""
        inline = [factor for factor in self.factors if factor.size is not None]
        return given_sizes(sizes, None, inline, [str(factor.name) for factor in self.factors])  # type: ignore[arg-type]


def _parts(side: Iterable[Fused | str]) -> list[str]:
    return [part for each in side for part in (each.parts if isinstance(each, Fused) else (each,))]


def has_blocks(text: object) -> bool:
    """Whether a text is an expression with blocks."""
    return isinstance(text, str) and "+" in text


@functools.lru_cache(maxsize=4096)
def read_blocks(text: str) -> BlocksExpression:
    """The expressions that an expression with blocks consists of. Cached.

    Raises `ExpressionError` where the sides hold different numbers of blocks.
    """
    left, right = _trees(text)
    names = {f.name for spec in (*left, *right) for dim in spec.dims for f in leaves_of(dim.factors)}
    name = next(each for each in _names_of_blocks() if each not in names)
    explicit = _explicit(text)
    found = BlocksExpression(text, *(tuple([_fused(spec, name, explicit) for spec in side]) for side in (left, right)))
    counts = len(_parts(found.left)), len(_parts(found.right))
    if counts[0] != counts[1]:
        raise ExpressionError(
            f"the left side is {counts[0]} tensors, blocks counted, and the right side {counts[1]}; "
            "each block becomes one tensor or block, in their order",
            text,
            0,
            len(text),
        )
    return found


def _names_of_blocks() -> Iterable[str]:
    return ("blocks" + "_" * more for more in itertools.count())


@functools.lru_cache(maxsize=4096)
def _trees(text: str) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
    tree = grammar.parse_blocks(text)
    if tree.results is None:
        raise ExpressionError("rearrange needs '->' and the result behind it", text, len(text) - 1, len(text))
    for spec in (*tree.operands, *tree.results):
        for factor in (f for dim in spec.dims for f in leaves_of(dim.factors)):
            if factor.name == "_":
                raise ExpressionError("'_' stands in specs only; rearrange needs a name", text, *factor.span)
    return tree.operands, tree.results


def leaves_of(factors: Iterable[Factor]) -> list[Factor]:
    """The factors, those of blocks in the place of these."""
    return [each for factor in factors for each in (itertools.chain(*factor.blocks) if factor.blocks else (factor,))]


def _fused(spec: Spec, name: str, explicit: frozenset[str]) -> Fused | str:
    at = next((i for i, dim in enumerate(spec.dims) if any(f.blocks for f in dim.factors)), None)
    if at is None:
        return str(_with_bare_names_unsplit(spec, explicit))
    dim = spec.dims[at]
    number = next(i for i, f in enumerate(dim.factors) if f.blocks)
    before, blocks, behind = dim.factors[:number], dim.factors[number], dim.factors[number + 1 :]
    whole = replace(dim, factors=(*before, Factor(name), *behind), grouped=len(dim.factors) > 1)

    def of(inner: Iterable[Dim]) -> Spec:
        dims = (*map(_alone, before), *inner, *map(_alone, behind))
        opened = replace(spec, dims=(*_opened(spec.dims[:at]), *dims, *_opened(spec.dims[at + 1 :])))
        return _with_bare_names_unsplit(opened, explicit)

    opened = of([_alone(Factor(name))])
    parts = tuple([str(of([Dim(block, grouped=len(block) > 1)])) for block in blocks.blocks])
    closed = replace(spec, dims=(*spec.dims[:at], whole, *spec.dims[at + 1 :]))
    inside = len(_opened(spec.dims[:at])) + len(before)
    dots = _has_dots(spec.dims[:at]) or any(f.name == "..." for f in before)
    return Fused(
        str(_with_bare_names_unsplit(closed, explicit)),
        str(opened),
        inside - len(opened.dims) if dots else inside,
        at - len(closed.dims) if _has_dots(spec.dims[:at]) else at,
        parts,
        spec,
        name,
    )


def _alone(factor: Factor) -> Dim:
    return Dim((factor,))


def _opened(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """Each factor as a dim, so that no size is asked for; a group with a place of its own stays."""
    return tuple([one for dim in dims for one in ((dim,) if dim.place is not None else map(_alone, dim.factors))])


def _has_dots(dims: Iterable[Dim]) -> bool:
    return any(factor.name == "..." for dim in dims for factor in dim.factors)


def _explicit(text: str) -> frozenset[str]:
    """The names that carry '@' anywhere in an expression, and nowhere a '*': where they are bare they are unsplit."""
    placed: dict[str, set[str]] = {}
    for dim in (dim for side in _trees(text) for spec in side for dim in spec.dims):
        for factor in leaves_of(dim.factors):
            place = factor.place or dim.place
            if factor.name and place is not None:
                placed.setdefault(factor.name, set()).update(place.names)
    return frozenset(name for name, axes in placed.items() if "*" not in axes)


def _with_bare_names_unsplit(spec: Spec, explicit: frozenset[str]) -> Spec:
    """The tensor with the empty place at bare names that another block or tensor of the expression splits."""

    def marked(factor: Factor) -> Factor:
        return replace(factor, place=Place(())) if factor.place is None and factor.name in explicit else factor

    dims = [dim if dim.place else replace(dim, factors=tuple(map(marked, dim.factors))) for dim in spec.dims]
    return replace(spec, dims=tuple(dims))


@functools.lru_cache(maxsize=4096)
def names_of(text: str) -> frozenset[str]:
    """The names of an expression without blocks that may be given a size."""
    tree = grammar.parse_tensor(text)
    dims = [dim for spec in (*tree.operands, *(tree.results or ())) for dim in spec.dims]
    return frozenset(f.name for dim in dims for f in dim.factors if f.name not in (None, "..."))  # type: ignore[misc]


# --- sizes


def sizes_of_blocks(
    fused: Fused, text: str, shape: tuple[int, ...], given: Mapping[str, int], pieces: PiecesOf
) -> tuple[dict[str, int], tuple[int, ...]]:
    """The sizes of names, and how many elements each block has in a tensor of this shape.

    `shape` is that of a whole tensor, or of this rank's shard; then `pieces` says what its axes split. Raises
    `SizeError` where a size doesn't follow or doesn't fit.

    >>> (qkv,) = read_blocks("(h k + g k + g k) d -> h k d, g k d, g k d").left
    >>> sizes_of_blocks(qkv, "", (32, 5), {"h": 8, "g": 4}, {})
    ({'h': 8, 'g': 4, 'k': 2}, (16, 8, 8))
    """
    known = dict(given)
    count, dim = len(fused.tree.dims), fused.tree.dims[fused.at]
    if len(shape) != count and not (_has_dots(fused.tree.dims) and len(shape) >= count - 1):
        raise SizeError(f"'{fused.tree}' has {count} dims; the tensor has {len(shape)}\nin  {text}")
    for number in fused.needed[1:]:
        (factor,) = fused.tree.dims[number].factors
        known.setdefault(str(factor.name), shape[number] * _split(factor.place, pieces))
    beside = [factor for factor in dim.factors if not factor.blocks]
    blocks = next(factor.blocks for factor in dim.factors if factor.blocks)
    occurring = [factor for factor in leaves_of(dim.factors) if factor.name]
    names = dict.fromkeys(str(factor.name) for factor in occurring)
    missing = [name for name in names if name not in known]

    def elements(factors: Iterable[Factor], sizes: Mapping[str, int]) -> int:
        """Of this rank, where `pieces` says what axes split."""
        return math.prod(
            [
                f.size or 1 if f.name is None else _local(f.name, sizes[f.name], _split(f.place, pieces), text)
                for f in factors
            ]
        )

    def whole(sizes: Mapping[str, int]) -> int:
        return elements(beside, sizes) * sum([elements(block, sizes) for block in blocks])

    total, parts = shape[fused.at], _split(dim.place, pieces)
    if missing and (len(missing) > 1 or parts > 1):
        why = " is split, and a shard shows this rank's part alone" if parts > 1 else f" = {total}"
        all_but = "" if parts > 1 else " all but one of"
        raise SizeError(
            f"the sizes of {' and '.join(map(repr, missing))} don't follow from  {_shown(dim)}{why}\n"
            f"give{all_but} them, like {missing[0]}=2\nin  {text}"
        )
    if missing:
        # A name stands once in a block: how many elements there are grows evenly with its size.
        (name,) = missing
        unit = math.lcm(*[_split(factor.place, pieces) for factor in occurring if factor.name == name])
        none, one = whole({**known, name: 0}), whole({**known, name: unit})
        if one > none and total >= none and (total - none) % (one - none) == 0:
            known[name] = (total - none) // (one - none) * unit
    if (missing and missing[0] not in known) or (parts == 1 and whole(known) != total):
        written = ", ".join(f"{name}={known[name]}" for name in names if name in known)
        raise SizeError(f"{_shown(dim)} can't be {total}{', with ' if written else ''}{written}\nin  {text}")
    if parts > 1:
        known[fused.name] = sum([elements(block, known) for block in blocks])
    return known, tuple([elements(block, known) for block in blocks])


def _split(place: Place | None, pieces: PiecesOf) -> int:
    return 1 if place is None else math.prod([pieces.get(name, 1) for name in place.names])


def _local(name: str, size: int, pieces: int, text: str) -> int:
    if size % pieces:
        raise SizeError(f"{size} doesn't divide into {pieces} parts: '{name}' is split inside of blocks\nin  {text}")
    return size // pieces


def _shown(dim: Dim) -> str:
    """A dim without its places."""

    def bare(factor: Factor) -> Factor:
        blocks = tuple([tuple([bare(each) for each in block]) for block in factor.blocks])
        return replace(factor, place=None, blocks=blocks)

    return str(replace(dim, factors=tuple([bare(factor) for factor in dim.factors]), place=None))
