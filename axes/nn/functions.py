"""Functions over split dims, by name: softmax, losses, norms and embeddings that gather nothing.

    p = axes.softmax(scores, "b h q k@cp", over="k")                            # two small all-reduces
    loss = axes.cross_entropy(logits, labels, "b s v@tp, b s -> ")              # the vocabulary stays split
    best = axes.argmax(logits, "b s v@tp", over="v")                            # the place in the whole vocabulary
    h = axes.embedding(ids, table, "b s, v@tp d -> b s@tp d")                   # summed and scattered
    y = axes.rms_norm(h, "b s d@tp", over="d", weight=w)

Each is the function of one device, values and gradients, on DTensors (the global view) as on plain
tensors that hold this rank's shard (the local view). A dim that is worked over must say how it is
split: where it has no `@` it is unsplit. Others flow. What goes over the wire has the size of the
result without the dim, never that of the dim.

16-bit floats are computed in 32 bits and rounded once. In the local view gradients are those of the
sum of all ranks' losses; `| same@tp` right of `->` makes them those of a loss that all ranks of `tp`
compute together. Shards may be uneven: where a function needs the whole size of a split dim, ranks tell
each other how much they have, in one more collective of one number. A size that is given as a keyword
(`v=32_001`) saves it; shards are cut then as `axes.shard` cuts them. DTensors know their sizes.

A label or an index outside of its range is NaN, in the value and in the gradient.

The vocabulary-parallel loss and embedding are Megatron-LM's.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from axes import (
    AxesError,
    ExpressionError,
    Mesh,
    ShardingError,
    SizeError,
    all_gather,
    axis_index,
    axis_size,
    pmax,
    psum,
    rearrange,
    shard_map,
    use_mesh,
)
from axes.extension import dense, read, shown
from axes.nn.options import checked_sizes, number

T = TypeVar("T", bound=torch.Tensor)
Read = TypeVar("Read", bound=Callable[..., Any])
Axes = tuple[str, ...]
Specs = tuple[Any, Any, Any]
"""What `axes.extension.read` gives of two operands and a result."""

Over = str | Sequence[str]
"""Names of dims, in one text or one by one."""

_HALVES = (torch.float16, torch.bfloat16)


def softmax(x: T, spec: str, /, over: Over, mesh: Mesh | None = None) -> T:
    """The softmax over named dims, which may be split. Like `torch.softmax`.

    It sends two all-reduces of the size of `x` without these dims, and one in the backward pass; none where the dims
    aren't split.

    Args:
        x: A DTensor, or in a region this rank's shard.
        spec: The dims of `x` and their axes: `"b s v@tp"`.
        over: The name of the dim, or several names.
        mesh: The mesh, by default the ambient one or that of `x`.

    Returns:
        A tensor that is sharded as `x` is.

    Raises:
        ShardingError: `x` isn't sharded as the spec says, or a name isn't in it.

    Examples:
        >>> softmax(torch.zeros(2, 4), "q k", over="k")[0].tolist()
        [0.25, 0.25, 0.25, 0.25]
    """
    form = _form("softmax", spec, dims_to_work_over(over))
    return _applied("softmax", functools.partial(_softmax, form), f"{form.spec} -> {form.spec}", (x,), mesh)


def log_softmax(x: T, spec: str, /, over: Over, mesh: Mesh | None = None) -> T:
    """The logarithm of the softmax over named dims. Arguments, errors and communication are those of `softmax`. Like
    `torch.log_softmax`.

    Examples:
        >>> log_softmax(torch.zeros(2, 4), "q k", over="k")[0, 0].exp().item()
        0.25
    """
    form = _form("log_softmax", spec, dims_to_work_over(over))
    return _applied("log_softmax", functools.partial(_log_softmax, form), f"{form.spec} -> {form.spec}", (x,), mesh)


def logsumexp(x: T, spec: str, /, over: Over, mesh: Mesh | None = None) -> T:
    """The logarithm of the sum of exponentials over named dims, which the result lacks. Like `torch.logsumexp`.

    It sends two all-reduces of the size of the result, and one in the backward pass; none where the dims aren't
    split. Arguments and errors are those of `softmax`.

    Examples:
        >>> round(logsumexp(torch.zeros(2, 8), "q k", over="k")[0].item(), 4)
        2.0794
    """
    form = _form("logsumexp", spec, dims_to_work_over(over))
    return _applied("logsumexp", functools.partial(_logsumexp, form), f"{form.spec} -> {form.rest}", (x,), mesh)


def entropy(x: T, spec: str, /, over: Over, mesh: Mesh | None = None) -> T:
    """The entropy, in nats, of the softmax over named dims, which the result lacks. Like
    `torch.distributions.Categorical(logits=x).entropy()`.

    It sends two all-reduces, of the size of the result and of twice that size, and one in the backward pass.
    Arguments and errors are those of `softmax`.

    Examples:
        >>> round(entropy(torch.zeros(2, 8), "q k", over="k")[0].item(), 4)
        2.0794
    """
    form = _form("entropy", spec, dims_to_work_over(over))
    return _applied("entropy", functools.partial(_entropy, form), f"{form.spec} -> {form.rest}", (x,), mesh)


def argmax(x: T, spec: str, /, over: str, mesh: Mesh | None = None, **sizes: int) -> T:
    """The index of the largest element along one dim of the whole tensor. Like `torch.argmax`.

    Each rank sends its own largest element, value and index, in two all-gathers.

    Args:
        x: A DTensor, or in a region this rank's shard.
        spec: The dims of `x` and their axes.
        over: The name of the dim.
        mesh: The mesh, by default the ambient one or that of `x`.
        **sizes: The whole size of the dim, of plain shards.

    Returns:
        Indices in int64, without the dim: of the first of equal elements, and of the first NaN if there is one.

    Raises:
        ShardingError: `x` isn't sharded as the spec says, or the name isn't in it.

    Examples:
        >>> argmax(torch.tensor([[1.0, 3.0, 3.0]]), "b v", over="v").tolist()
        [1]
    """
    form, whole = _of_one_dim("argmax", spec, over, x, sizes)
    local = functools.partial(_argmax, form.worked[0], whole)
    return _applied("argmax", local, f"{form.spec} -> {form.rest}", (x,), mesh)


def topk(x: T, spec: str, k: int, /, over: str, mesh: Mesh | None = None, **sizes: int) -> tuple[T, T]:
    """The `k` largest elements along one dim of the whole tensor, in descending order, and their indices. Like
    `torch.topk`.

    Each rank sends its own `k` candidates, in two all-gathers. Of equal elements any are taken. For a split dim of
    plain shards without a size, the host waits.

    Args:
        x: A DTensor, or in a region this rank's shard.
        spec: The dims of `x` and their axes.
        k: The number of elements.
        over: The name of the dim.
        mesh: The mesh, by default the ambient one or that of `x`.
        **sizes: The whole size of the dim, of plain shards.

    Returns:
        Values and indices, with `k` elements in the place of the dim, unsplit.

    Raises:
        ShardingError: `x` isn't sharded as the spec says, or the name isn't in it.
        SizeError: The dim has fewer than `k` elements.

    Examples:
        >>> values, indices = topk(torch.tensor([[1.0, 5.0, 3.0]]), "b v", 2, over="v")
        >>> values.tolist(), indices.tolist()
        ([[5.0, 3.0]], [[1, 2]])
    """
    count = number("topk's k is a whole number from 1", k, 1, 2**31 - 1, whole=True)
    form, whole = _of_one_dim("topk", spec, over, x, sizes)
    dims = ["_" if dim == form.worked[0].name else dim for dim in form.names]
    local = functools.partial(_topk, form.worked[0], whole, count)
    result = " ".join(dims)
    return _applied("topk", local, f"{form.spec} -> {result}, {result}", (x,), mesh)  # type: ignore[return-value]


def rms_norm(
    x: T,
    spec: str,
    /,
    over: Over,
    weight: T | None = None,
    eps: float | None = None,
    mesh: Mesh | None = None,
    **sizes: int,
) -> T:
    """Divide by the root of the mean square over named dims, which may be split, and multiply by a weight. Like
    `torch.nn.functional.rms_norm`.

    It sends one all-reduce of the size of `x` without these dims, and one in the backward pass.

    Args:
        x: A DTensor, or in a region this rank's shard.
        spec: The dims of `x` and their axes.
        over: The name of the dim, or several names.
        weight: A factor for each element of these dims, split as they are.
        eps: Added to the mean square; by default that of the dtype of the computation.
        mesh: The mesh, by default the ambient one or that of `x`.
        **sizes: The whole sizes of these dims, of plain shards. Without them the ranks exchange their sizes.

    Returns:
        A tensor that is sharded as `x` is.

    Raises:
        ShardingError: A tensor isn't sharded as the spec says, or a name isn't in it.

    Examples:
        >>> rms_norm(torch.full((2, 4), 3.0), "s d", over="d")[0].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    form = _form("rms_norm", spec, dims_to_work_over(over))
    if eps is not None:
        number("rms_norm's eps is a number from 0, like 1e-6", eps, 0, 1e300)
    local = functools.partial(_rms_norm, form, _wholes(form.worked, x, sizes), eps)
    return _normed("rms_norm", local, form, (x, weight), mesh)


def layer_norm(
    x: T,
    spec: str,
    /,
    over: Over,
    weight: T | None = None,
    bias: T | None = None,
    eps: float = 1e-5,
    mesh: Mesh | None = None,
    **sizes: int,
) -> T:
    """Bring named dims, which may be split, to mean 0 and variance 1, multiply by a weight and add a bias. Like
    `torch.nn.functional.layer_norm`.

    It sends two all-reduces of the size of `x` without these dims, and two in the backward pass.

    Args:
        x: A DTensor, or in a region this rank's shard.
        spec: The dims of `x` and their axes.
        over: The name of the dim, or several names.
        weight: A factor for each element of these dims, split as they are.
        bias: A summand for each element of these dims, split as they are.
        eps: Added to the variance.
        mesh: The mesh, by default the ambient one or that of `x`.
        **sizes: The whole sizes of these dims, of plain shards. Without them the ranks exchange their sizes.

    Returns:
        A tensor that is sharded as `x` is.

    Raises:
        ShardingError: A tensor isn't sharded as the spec says, or a name isn't in it.

    Examples:
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), "s d", over="d", eps=0.0)[0].tolist()
        [-1.0, 1.0]
    """
    form = _form("layer_norm", spec, dims_to_work_over(over))
    number("layer_norm's eps is a number from 0, like 1e-5", eps, 0, 1e300)
    local = functools.partial(_layer_norm, form, _wholes(form.worked, x, sizes), eps, weight is not None)
    return _normed("layer_norm", local, form, (x, weight, bias), mesh)


def cross_entropy(
    logits: T,
    labels: T,
    expression: str,
    /,
    reduction: Literal["mean", "sum"] = "mean",
    ignore_index: int = -100,
    mesh: Mesh | None = None,
    *,
    weight: T | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    **sizes: int,
) -> T:
    """The cross entropy of logits and labels, also over a split vocabulary: `"b@dp s v@tp, b@dp s -> "`. Like
    `torch.nn.functional.cross_entropy`.

    A split vocabulary takes two all-reduces of the size of the labels, and one in the backward pass. Split dims that
    are reduced take one more each way, of the size of the result, unless it stays pending (`| sum@dp`). With `|
    same@dp` in the result the backward pass sends nothing over that axis.

    Args:
        logits: Scores of the classes: a DTensor, or in a region this rank's shard.
        labels: Indices in the whole vocabulary. A label outside of it makes the loss, and the gradient of its row,
            NaN on every rank; torch raises an error there.
        expression: The dims of logits, labels and result. The name that only the logits have is the vocabulary.
        reduction: `"mean"` over the labels that aren't `ignore_index`, or `"sum"`, over the dims that the result
            lacks.
        ignore_index: Labels of this value have loss 0 and gradient 0.
        mesh: The mesh, by default the ambient one or that of the logits.
        weight: A weight for each class, split as the vocabulary. It gets no gradient.
        label_smoothing: The share of each label that is spread over all classes.
        z_loss: A factor, which keeps logits small (1e-4 in PaLM). Each label's loss gets this times the square of the
            log of the softmax's denominator, times the weight of the label's class.
        **sizes: The whole size of the vocabulary, of plain shards. Without it the ranks exchange their sizes.

    Returns:
        The loss, with the dims of the result.

    Raises:
        ShardingError: A tensor isn't sharded as the expression says.
        ExpressionError: The text isn't such an expression.

    Examples:
        >>> round(cross_entropy(torch.zeros(2, 8), torch.tensor([1, 7]), "s v, s -> ").item(), 4)
        2.0794
    """
    form = _loss_form(expression)
    if not isinstance(reduction, str) or reduction not in ("mean", "sum"):
        raise ShardingError(f"cross_entropy's reduction is 'mean' or 'sum'; found {shown(reduction)}")
    number("cross_entropy's label_smoothing is a number from 0 to 1", label_smoothing, 0, 1)
    number("cross_entropy's ignore_index is a whole number", ignore_index, -(2**63), 2**63 - 1, True)
    number("cross_entropy's z_loss is a number from 0, like 1e-4", z_loss, 0, 1e300)
    check_integers("cross_entropy", "labels", labels)
    (whole,) = _wholes(form.over.worked, logits, sizes)
    is_mean = reduction == "mean" and bool(form.reduced)
    local = functools.partial(_cross_entropy, form, whole, is_mean, ignore_index, label_smoothing, z_loss)
    if weight is None:
        return _applied("cross_entropy", local, f"{form.left} -> {form.result}", (logits, labels), mesh)
    check_floats("cross_entropy", weight)
    expression = f"{form.left}, {form.over.parameter} -> {form.result}"
    return _applied("cross_entropy", local, expression, (logits, labels, weight.detach()), mesh)


def embedding(
    ids: T, table: T, expression: str, /, mesh: Mesh | None = None, padding_idx: int | None = None, **sizes: int
) -> T:
    """Rows of a table, whose rows may be split: `"b s, v@tp d -> b s d"`. Like `torch.nn.functional.embedding`.

    Each rank looks up the rows that it has, and takes zeros for the others. The sum over the axes of the rows is an
    all-reduce (`b s d`), a reduce-scatter (`b s@tp d`), or stays pending (`| sum@tp`).

    Args:
        ids: Indices in the whole table. One outside of the table gives a row of NaN, and NaN gradients in the
            nearest row.
        table: The rows.
        expression: The dims of ids, table and result.
        mesh: The mesh, by default the ambient one or that of the tensors.
        padding_idx: A row that gets no gradient; a negative one counts from the end of the whole table.
        **sizes: The whole number of rows, of plain shards. Without it the ranks exchange their sizes.

    Returns:
        A row for each index.

    Raises:
        ShardingError: A tensor isn't sharded as the expression says.
        ExpressionError: The text isn't such an expression.

    Examples:
        >>> embedding(torch.tensor([2, 0]), torch.eye(3), "s, v d -> s d").tolist()
        [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    left, middle, right, rows = _table_form(expression)
    check_integers("embedding", "ids", ids)
    check_floats("embedding", table)
    (whole,) = _wholes((rows,), table, sizes)
    local = functools.partial(_embedding, rows, whole, padding_idx)
    found = _applied("embedding", local, f"{left} -> {middle}", (ids, table), mesh)
    return found if middle == right else rearrange(found, f"{middle} -> {right}", mesh=mesh)


def checked_padding(padding_idx: int, rows: int | torch.Tensor) -> int | torch.Tensor:
    """The number of a row of the table; a negative one counts from the end. `rows` may be known to the device alone."""
    if not isinstance(padding_idx, int) or (isinstance(rows, int) and not -rows <= padding_idx < rows):
        raise SizeError(f"embedding's padding_idx is a row of the table, which has {rows}; found {shown(padding_idx)}")
    return padding_idx if padding_idx >= 0 else padding_idx + rows


# expressions


class Worked(NamedTuple):
    """A dim that is worked over: its name, its place among the dims of the tensor, the axes that split it.

    `dim` is negative where it stands behind an ellipsis.
    """

    name: str
    dim: int
    axes: Axes


@dataclass(frozen=True)
class _Form:
    """A spec and the dims to work over. `spec` says of these that they are unsplit where it is so.

    `rest` is the spec without them, `parameter` that of a tensor with nothing else. `names`: its dims as text, those
    that are worked over by their names alone. `dims`: the places of what is worked over, `axes`: all that split it.
    """

    spec: str
    rest: str
    parameter: str
    names: tuple[str, ...]
    worked: tuple[Worked, ...]
    dims: tuple[int, ...]
    axes: Axes


def dims_to_work_over(over: Over) -> Axes:
    """The names in an `over`; `ShardingError` for what has none."""
    names = over.split() if isinstance(over, str) else over
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ShardingError(f"over names dims, like 'd' or 'h d'; found {shown(over)}")
    return tuple(names)


def _read_once(reading: Read) -> Read:
    """A function of texts, cached; to `torch.compile` its result is a constant."""
    kept = functools.lru_cache(maxsize=4096)(reading)

    @torch.compiler.assume_constant_result
    @functools.wraps(reading)
    def read_or_kept(*texts: Any) -> Any:
        return kept(*texts)

    return read_or_kept  # type: ignore[return-value]


def dims_worked_over(spec: str, over: Over) -> str:
    """The spec of a parameter of a norm, which has the dims that the norm is over."""
    return _form("a norm", spec, dims_to_work_over(over)).parameter


@_read_once
def _form(what: str, spec: str, over: Axes) -> _Form:
    tree = read(spec).spec
    if tree.pending:
        raise ShardingError(f"{what} isn't linear, so it can't take what is pending; resolve it before: '{spec}'")
    known = [_name(dim) for dim in tree.dims]
    for name in over or ("",):
        if name not in known:
            found = shown(name, filter(None, known))
            raise ExpressionError(f"{what} is over dims of the spec by name; found {found}", spec, 0, len(spec))
    dots = known.index("...") if "..." in known else len(known)
    dims = [_explicit(dim) if name in over else str(dim) for dim, name in zip(tree.dims, known, strict=True)]
    worked = [
        Worked(name, at if at < dots else at - len(known), _axes(what, spec, tree.dims[at]))
        for at, name in enumerate(known)
        if name is not None and name in over
    ]
    rest = [dim for dim, name in zip(dims, known, strict=True) if name not in over]
    own = [dim for dim, name in zip(dims, known, strict=True) if name in over]
    whole, others, parameter = map(" ".join, (dims, rest, own))
    names = tuple([str(name) if name in over else dim for dim, name in zip(dims, known, strict=True)])
    axes = tuple(axis for each in worked for axis in each.axes)
    return _Form(whole, others, parameter, names, tuple(worked), tuple(each.dim for each in worked), axes)


def _name(dim: Any) -> str | None:
    """The name of a dim that is one; None for groups, numbers and `_`."""
    return None if dim.grouped or dim.factors[0].name == "_" else dim.factors[0].name


def _explicit(dim: Any) -> str:
    """A dim of one name, with a place: that of an unsplit one where it has none."""
    return str(dim) if dim.factors[0].place is not None else f"{dim}@()"


def _axes(what: str, text: str, dim: Any) -> Axes:
    place = dim.factors[0].place
    if place is not None and "*" in place.names:
        raise ExpressionError(f"{what} needs to know how {dim} is split; '*' doesn't say it", text, *dim.span)
    return () if place is None else place.names


@dataclass(frozen=True)
class _Loss:
    """An expression of a loss: its two operands, its result, and the logits over the vocabulary.

    The dims of the labels that the result lacks are at `reduced`, after one for all that is summed together, and the
    axes `sums` split them. Over the axes `kept` the sum stays pending. `vocabulary` and `others` are the expressions of
    the sums over the vocabulary's axes and over `sums` where these leave something the same or pending; else "".
    """

    left: str
    result: str
    over: _Form
    vocabulary: str
    others: str
    reduced: tuple[int, ...]
    sums: Axes
    kept: Axes


@_read_once
def _loss_form(expression: str) -> _Loss:
    logits, labels, result = _three_named("cross_entropy", expression, "logits, labels -> loss")
    ours, theirs, kept = ({_name(dim): dim for dim in spec.dims} for spec in (logits, labels, result))
    missing = [str(name) for name in ours if name not in theirs]
    if len(missing) != 1 or [str(dim) for dim in logits.dims if _name(dim) in theirs] != list(map(str, labels.dims)):
        _wrong(
            expression, "labels have the names of the logits without the vocabulary, and lie alike: 'b s v, b s -> '"
        )
    if [str(dim) for dim in labels.dims if _name(dim) in kept] != list(map(str, result.dims)):
        _wrong(expression, "the loss has names of the labels, in the same order and split alike, or none")
    fixed = [
        " ".join([str(dim) if _name(dim) in kept else _explicit(dim) for dim in spec.dims]) for spec in (logits, labels)
    ]
    over = _form("cross_entropy", fixed[0], tuple(missing))
    sums = tuple(
        [axis for name in theirs if name not in kept for axis in _axes("cross_entropy", expression, theirs[name])]
    )
    found = {p.op: p.place.names for p in result.pending or () if p.place is not None}
    same = [axis for axis in over.axes if axis in found.get("same", ())]
    if not {p.op for p in result.pending or ()} <= {"sum", "same"} or not {*found.get("sum", ())} <= {*sums}:
        _wrong(expression, "what a loss can leave pending is the sum over axes that split what it reduces")
    pending = " ".join(map(str, result.pending or ()))
    before = " ".join(filter(None, (_at("sum", sums), _at("same", same))))
    vocabulary = f"... | {_at('sum', over.axes)} -> ... | {_at('same', same)}" if same else ""
    others = f"... | {before} -> ... | {pending}" if pending else ""
    reduced = tuple([1 + at for at, name in enumerate(theirs) if name not in kept])
    left, stays = f"{fixed[0]}, {fixed[1]}", found.get("sum", ())
    return _Loss(left, str(result), over, vocabulary, others, reduced, sums, stays)


def _at(op: str, axes: Sequence[str]) -> str:
    return f"{op}@({' '.join(axes)})" if axes else ""


def rows_of_table(expression: str) -> int:
    """The dim of the table that is looked up in, of the expression of an embedding."""
    return int(_table_form(expression)[-1].dim)


@_read_once
def _table_form(expression: str) -> tuple[str, str, str, Worked]:
    """Of the expression of an embedding: its left side, what a look-up gives before its sum, the result, the rows."""
    ids, table, result = _three_named("embedding", expression, "ids, table -> rows")
    known, columns, wanted = ([_name(dim) for dim in spec.dims] for spec in (ids, table, result))
    missing = [str(name) for name in columns if name not in wanted]
    if len(missing) != 1 or {*known, *columns} - {*missing} != {*wanted}:
        _wrong(expression, "the result has the names of the ids and of the table without its rows: 'b s, v d -> b s d'")
    form = _form("embedding", str(table), tuple(missing))
    (rows,) = form.worked
    dims = map(str, (*ids.dims, *(dim for dim in table.dims if _name(dim) != rows.name)))
    place = rows.axes[0] if len(rows.axes) == 1 else f"({' '.join(rows.axes)})"
    middle = " ".join([*dims, *([f"| sum@{place}"] if rows.axes else [])])
    return f"{ids}, {form.spec}", middle, str(result), rows


def three_specs(what: str, expression: str, shape: str) -> Specs:
    """The three specs of `one, two -> result`; `ExpressionError`, which says the shape, for anything else."""
    tree = read(expression)
    if len(tree.operands) != 2 or tree.results is None or len(tree.results) != 1:
        _wrong(expression, f"{what} is '{shape}'")
    return *tree.operands, tree.results[0]


def _three_named(what: str, expression: str, shape: str) -> Specs:
    """The same with a name for each dim, and nothing pending on the left."""
    specs = three_specs(what, expression, shape)
    for dim in (dim for spec in specs for dim in spec.dims):
        if _name(dim) in (None, "..."):
            raise ExpressionError(f"{what} needs a name for each dim", expression, *dim.span)
    if any(spec.pending for spec in specs[:2]):
        _wrong(expression, f"{what} takes no '|' on the left; resolve what is pending before")
    return specs


def _wrong(expression: str, message: str) -> NoReturn:
    raise ExpressionError(message, expression, 0, len(expression))


# calls


def _applied(
    what: str, local: Callable[..., torch.Tensor], expression: str, tensors: Sequence[torch.Tensor], mesh: Mesh | None
) -> torch.Tensor:
    """The function on DTensors as a region, on plain tensors as it is."""
    x = tensors[1] if what == "embedding" else tensors[0]
    check_floats(what, x)
    if _is_widened(what, x.dtype, x.device.type):
        tensors = [x.float() if x.is_floating_point() else x for x in tensors]
    if any(isinstance(x, DTensor) for x in tensors):
        with contextlib.nullcontext() if torch.compiler.is_compiling() else _about(what):
            return shard_map(local, expression, mesh)(*tensors)
    tensors = [dense(f"axes.{what}", x) for x in tensors]
    _check_shapes(what, expression.replace("@()", ""), tensors)
    with use_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        return local(*tensors)


@contextlib.contextmanager
def _about(what: str) -> Iterator[None]:
    """Errors of a region say the function that the user has called, and of unsplit dims no more than the user has."""
    try:
        yield
    except AxesError as error:
        error.args = (str(error).replace("shard_map", f"axes.{what}").replace("@()", ""), *error.args[1:])
        raise


@torch.compiler.assume_constant_result
def _is_widened(what: str, dtype: torch.dtype, device_type: str) -> bool:
    """Whether autocast has torch compute one of its functions in 32 bits; to a graph a constant."""
    wide = ("cross_entropy",) if device_type == "cpu" else ("cross_entropy", "layer_norm", "logsumexp", "softmax")
    return what in wide and dtype in _HALVES and torch.is_autocast_enabled(device_type)


@_read_once
def _operands(expression: str) -> tuple[tuple[str, tuple[str | None, ...]], ...]:
    """For each operand its spec and the names of its dims."""
    return tuple((str(spec), tuple(map(_name, spec.dims))) for spec in read(expression).operands)


def _check_shapes(what: str, expression: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuses plain tensors that don't have the dims of their specs, or have a name in two sizes."""
    found: dict[str, int] = {}
    for x, (spec, names) in zip(tensors, _operands(expression), strict=True):
        at = names.index("...") if "..." in names else len(names)
        named = (*names[:at], *[None] * (x.ndim - len(names) + 1) * ("..." in names), *names[at + 1 :])
        if len(named) != x.ndim:
            dims = len(names) - ("..." in names)
            raise ShardingError(f"{what}: the spec '{spec}' has {dims} dims, the tensor {x.ndim}: {list(x.shape)}")
        for name, size in zip(named, x.shape, strict=True) if not torch.compiler.is_compiling() else ():
            if name is not None and found.setdefault(name, size) != size:
                raise SizeError(f"{what}: '{name}' is {found[name]} and {size}\nin  {expression}")


def check_floats(what: str, x: torch.Tensor) -> None:
    """`ShardingError` for what is no dense tensor of floats."""
    dense(f"axes.{what}", x)
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ShardingError(f"axes.{what} is of floats; found {x.dtype}. Write x.float()")


def check_integers(what: str, which: str, x: torch.Tensor) -> None:
    """`ShardingError` for what is no tensor of whole numbers."""
    if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ShardingError(f"{what}: {which} are whole numbers; found {getattr(x, 'dtype', type(x).__name__)}")


def _normed(
    what: str,
    local: Callable[..., torch.Tensor],
    form: _Form,
    tensors: Sequence[torch.Tensor | None],
    mesh: Mesh | None,
) -> torch.Tensor:
    given = [x for at, x in enumerate(tensors) if x is not None or at == 0]
    left = ", ".join([form.spec, *[form.parameter] * (len(given) - 1)])
    return _applied(what, local, f"{left} -> {form.spec}", given, mesh)


def _of_one_dim(what: str, spec: str, over: str, x: torch.Tensor, sizes: Mapping[str, int]) -> tuple[_Form, int | None]:
    """The form of a function over one dim, and the whole size of that dim."""
    names = dims_to_work_over(over)
    if len(names) != 1:
        raise ShardingError(f"{what} is over one dim, like 'v'; found {shown(over)}")
    form = _form(what, spec, names)
    (whole,) = _wholes(form.worked, x, sizes)
    return form, whole


def _wholes(worked: Sequence[Worked], x: torch.Tensor, sizes: Mapping[str, int]) -> tuple[int | None, ...]:
    """The whole sizes of dims, None where a plain tensor leaves them open."""
    names = [each.name for each in worked]
    given = checked_sizes(sizes, names, "isn't a dim that the function works over")
    if not isinstance(x, DTensor):
        return tuple([given.get(name) for name in names])
    # A tensor that has other dims than its spec is refused later.
    wholes = [x.shape[each.dim] if -x.ndim <= each.dim < x.ndim else None for each in worked]
    for name, whole in zip(names, wholes, strict=True):
        if whole is not None and given.get(name, whole) != whole:
            raise SizeError(f"'{name}' is {whole} in the tensor of shape {list(x.shape)}, and {given[name]} is given")
    return tuple(wholes)


def _part(worked: Worked, x: torch.Tensor, whole: int | None) -> tuple[int | torch.Tensor, int | torch.Tensor]:
    """Where this rank's part of a dim starts, and the whole size.

    Of a split dim whose whole size isn't known, ranks tell each other how much they have. The answer
    stays on the device, so that nothing waits for it.
    """
    local = x.shape[worked.dim]
    if whole is None and worked.axes:
        sizes = all_gather(x.new_full((1,), local, dtype=torch.int64), worked.axes)
        return sizes[: axis_index(worked.axes)].sum(), sizes.sum()
    whole = local if whole is None else whole
    start, stop = 0, whole
    for axis in worked.axes:
        piece, at = -(-(stop - start) // axis_size(axis)), axis_index(axis)
        start, stop = min(stop, start + at * piece), min(stop, start + (at + 1) * piece)
    if stop - start != local:
        raise SizeError(f"'{worked.name}' is {whole} in whole and so {stop - start} on this rank; found {local}")
    return start, whole


# the functions on this rank's tensors; names of axes mean the ambient mesh


def _softmax(form: _Form, x: torch.Tensor) -> torch.Tensor:
    weights = _below_largest(form, x).exp()
    return (weights / _sum(weights.sum(form.dims, keepdim=True), form.axes)).to(x.dtype)


def _log_softmax(form: _Form, x: torch.Tensor) -> torch.Tensor:
    below = _below_largest(form, x)
    return (below - _sum(below.exp().sum(form.dims, keepdim=True), form.axes).log()).to(x.dtype)


def _logsumexp(form: _Form, x: torch.Tensor) -> torch.Tensor:
    wide = _wide(x)
    largest = _largest(wide, form.dims, form.axes)
    largest = largest.masked_fill(largest.isposinf(), 0.0)
    total = _sum((wide - largest).exp().sum(form.dims, keepdim=True), form.axes)
    return (total.log() + largest).squeeze(form.dims).to(x.dtype)


def _entropy(form: _Form, x: torch.Tensor) -> torch.Tensor:
    below = _below_largest(form, x)
    weights = below.exp()
    products = weights * below.masked_fill(below.isneginf(), 0.0)  # what never comes adds nothing
    total, product = _sum(torch.stack((weights.sum(form.dims), products.sum(form.dims))), form.axes)
    return (total.log() - product / total).to(x.dtype)


def _argmax(worked: Worked, whole: int | None, x: torch.Tensor) -> torch.Tensor:
    start, size = _part(worked, x, whole)
    if isinstance(size, int) and size == 0:
        raise SizeError(f"argmax: '{worked.name}' has no elements")
    rows = F.pad(x.detach().movedim(worked.dim, -1), (0, 1), value=-math.inf)  # there is one where this rank has none
    values, places = rows.unsqueeze(0).max(-1)  # of equal ones, and of NaNs, the first
    places = places + start
    if worked.axes:
        values, places = all_gather(values, worked.axes), all_gather(places, worked.axes)
    return places.gather(0, values.max(0, keepdim=True).indices).squeeze(0)


def _topk(worked: Worked, whole: int | None, k: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    start, size = _part(worked, x, whole)
    is_known = isinstance(size, int) or not (torch.compiler.is_compiling() or x.is_meta)
    if is_known and k > int(size):
        raise SizeError(f"topk: '{worked.name}' has {int(size)} elements, and k is {k}")
    values, places = x.movedim(worked.dim, -1).topk(min(k, x.shape[worked.dim]), -1)
    places = places + start
    if worked.axes:  # those of a rank that has fewer than k come last
        missing = (0, k - values.shape[-1])
        values, places = F.pad(values, missing, value=-math.inf), F.pad(places, missing, value=2**62)
        values, places = (all_gather(each.contiguous(), worked.axes, -1) for each in (values, places))
        last = (places == 2**62).to(torch.uint8).sort(dim=-1, stable=True).indices
        values, order = values.gather(-1, last).sort(dim=-1, descending=True, stable=True)
        values, places = values[..., :k], places.gather(-1, last).gather(-1, order)[..., :k]
    return values.movedim(-1, worked.dim), places.movedim(-1, worked.dim)


def _rms_norm(
    form: _Form, wholes: Sequence[int | None], eps: float | None, x: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    wide, count = _wide(x), _count(form, wholes, x)
    square = _sum(wide.square().sum(form.dims, keepdim=True), form.axes) / count
    normed = wide * (square + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    return (normed if weight is None else normed * _along(form, x, weight)).to(x.dtype)


def _layer_norm(
    form: _Form, wholes: Sequence[int | None], eps: float, weighted: bool, x: torch.Tensor, *parameters: torch.Tensor
) -> torch.Tensor:
    wide, count = _wide(x), _count(form, wholes, x)
    centred = wide - _sum(wide.sum(form.dims, keepdim=True), form.axes) / count
    variance = _sum(centred.square().sum(form.dims, keepdim=True), form.axes) / count
    normed = centred * (variance + eps).rsqrt()
    weight, *bias = parameters if weighted else (None, *parameters)
    normed = normed if weight is None else normed * _along(form, x, weight)
    return (normed + _along(form, x, bias[0]) if bias else normed).to(x.dtype)


def _cross_entropy(
    form: _Loss,
    whole: int | None,
    mean: bool,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    logits: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    (vocabulary,), labels = form.over.worked, labels.long()
    start, size = _part(vocabulary, logits, whole)
    x = _wide(logits).movedim(vocabulary.dim, -1)
    largest = _largest(x, (-1,), vocabulary.axes)
    x = x - largest
    weights = None if weight is None else weight.to(x.dtype).expand(x.shape)
    rows = [x.exp().sum(-1), _picked(x, labels - start)]
    if weights is not None:
        rows.append(_picked(weights, labels - start))
    if smoothing:
        rows += [(x if weights is None else x * weights).sum(-1)]
        rows += [] if weights is None else [weights.sum(-1)]
    total, chosen, *more = _sum(torch.stack(rows), vocabulary.axes, f"{form.vocabulary}")
    total = total.log()
    ignored = labels.eq(ignore_index)
    counted = (~ignored).to(x.dtype) if weights is None else more[0].masked_fill(ignored, 0.0)
    loss = total - chosen if weights is None else (total - chosen) * counted
    if smoothing:
        every = size * total - more[0] if weights is None else more[2] * total - more[1]
        loss = (1 - smoothing) * loss + smoothing * every / size
    if z_loss:
        loss = loss + z_loss * (total + largest.squeeze(-1)).square() * counted
    outside = ~ignored & ((labels < 0) | (labels >= size))
    loss = loss.masked_fill(ignored, 0.0) * _nan_where(outside, x.dtype)
    both = torch.stack((loss, counted))
    both = both.sum(form.reduced) if form.reduced else both
    loss, counted = _sum(both, form.sums, f"{form.others}")
    if mean:
        loss = loss / _sum(counted, form.kept)
    return loss.to(logits.dtype)


def _picked(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The elements of the last dim by index; 0 where this rank doesn't have them."""
    size = x.shape[-1]
    x = x if size else x.sum(-1, keepdim=True)
    found = x.gather(-1, index.clamp(0, max(size, 1) - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where((index >= 0) & (index < size), found, 0.0)


def _embedding(
    rows: Worked, whole: int | None, padding: int | None, ids: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    start, every = _part(rows, table, whole)
    table, ids = table.movedim(rows.dim, 0), ids.long()
    size, index = table.shape[0], ids.clamp(min=0).clamp(max=every - 1) - start
    columns = [*ids.shape, *[1] * (table.ndim - 1)]
    here, outside = ((index >= 0) & (index < size)).view(columns), ((ids < 0) | (ids >= every)).view(columns)
    table = table if size else table.sum(0, keepdim=True)
    found = torch.where(here, table[index.clamp(0, max(size, 1) - 1)], 0.0)
    if padding is not None:
        row = checked_padding(padding, every)
        found = torch.where((ids == row).view(columns), found.detach(), found)
    return found * _nan_where(outside, table.dtype)


def _nan_where(outside: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A factor that is NaN where `outside`, else 1: as a factor it is in the gradient, too."""
    return torch.ones_like(outside, dtype=dtype).masked_fill(outside, math.nan)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in _HALVES else x


def _sum(x: torch.Tensor, axes: Axes, expression: str = "") -> torch.Tensor:
    """The sum over axes; by an expression, where it leaves something pending or the same."""
    if expression:
        return rearrange(x, expression)
    return psum(x, axes) if axes else x


def _below_largest(form: _Form, x: torch.Tensor) -> torch.Tensor:
    """`x`, in 32 bits at least, without its largest element."""
    wide = _wide(x)
    return wide - _largest(wide, form.dims, form.axes)


def _largest(x: torch.Tensor, dims: tuple[int, ...], axes: Axes) -> torch.Tensor:
    """The maximum over dims, kept as size 1, to be subtracted: 0 where nothing is larger than minus infinity.

    Plus infinity stays: what overflowed makes the whole row NaN, as it does on one device.
    """
    x = x.detach()
    empty = 0 in [x.shape[dim] for dim in dims]
    found = x.sum(dims, keepdim=True) - math.inf if empty else x.amax(dims, keepdim=True)
    found = pmax(found, axes) if axes else found
    return found.masked_fill(found.isneginf(), 0.0)


def _count(form: _Form, wholes: Sequence[int | None], x: torch.Tensor) -> Any:
    """How many elements are worked over in whole; where ranks must tell each other, a tensor."""
    count: Any = 1
    for worked, whole in zip(form.worked, wholes, strict=True):
        count = count * _part(worked, x, whole)[1]
    return count


def _along(form: _Form, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter with the dims that are worked over, as it multiplies `x`."""
    dims = [dim % x.ndim for dim in form.dims]
    return parameter.view([x.shape[dim] if dim in dims else 1 for dim in range(x.ndim)])
