"""Layers whose dims have names, after einops' own `EinMix` and Flax's `Einsum`.

    class MLP(nn.Module):
        def __init__(self, embed, mlp):
            super().__init__()
            self.norm = axes.nn.RMSNorm("b s embed", over="embed", embed=embed)
            self.up = axes.nn.Einsum("b s embed, mlp embed -> b s mlp", embed=embed, mlp=mlp)
            self.down = axes.nn.Einsum("b s mlp, embed mlp -> b s embed", embed=embed, mlp=mlp)

        def forward(self, x):
            return x + self.down(F.silu(self.up(self.norm(x))))

A layer's expression names the dims of its parameter, and the layer is annotated with them: `axes.shard_module(model,
rules=axes.Rules(mlp="tp", embed=None))` needs no patterns. The same layer takes DTensors, a region's shards and whole
tensors. Where a region works on shards of a name, the expression says so with an `@`, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from axes.algebra.errors import ExpressionError, ShardingError, SizeError, shortened, shown
from axes.algebra.expressions.rules import REDUCTIONS
from axes.algebra.grammar import Spec, TensorExpression, parse_spec, parse_tensor
from axes.algebra.sizes import checked_flag, checked_size, given_sizes
from axes.nn.annotations import annotate
from axes.nn.functions import (
    checked_eps,
    checked_loss,
    checked_padding,
    cross_entropy,
    dims_to_work_over,
    embedding,
    layer_norm,
    rms_norm,
    rows_of_table,
)
from axes.ops.einops_ops import einsum, rearrange, reduce


class Einsum(torch.nn.Module):
    """A product with a weight: `Einsum("b s d, (h k) d -> b s h k", h=32, k=64, d=2048)`.

    The second operand is the weight, whose names have sizes, by keyword or inline. `bias` names the dims of a bias,
    which are dims of the result: `bias="h k"`. Values are initialized as by `torch.nn.Linear`: uniform, within the root
    of 1 / the number of products that are added up.

    Raises `ExpressionError` for text that isn't `input, weight -> result` and for a bias of a result that stays pending
    (`| sum@tp`), `SizeError` for a missing size.
    """

    def __init__(
        self,
        expression: str,
        /,
        *,
        bias: str | None = None,
        sizes: Mapping[str, int] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **keywords: int,
    ):
        super().__init__()
        self.input, weight, result = _two(expression, "Einsum")
        self.expression, self.sizes = expression, given_sizes(keywords, sizes)
        self.weight = _parameter(weight, self.sizes, expression, device, dtype)
        annotate(self, {"weight": _without_places(weight, self.sizes)})
        names = _names(result)
        self.fan_in = math.prod(_size(name, self.sizes, weight, expression) for name in _names(weight) - names)
        self.bias, self.bias_expression = None, ""
        if bias is not None:
            spec = parse_spec(bias)
            if not _names(spec) <= names:
                raise ExpressionError(
                    f"the bias '{bias}' has a name that the result hasn't", expression, 0, len(expression)
                )
            for pending in result.pending or ():
                if pending.op != "same":
                    raise ExpressionError(
                        f"the result stays pending, '| {pending}', and each rank would add the bias to its summand; "
                        "leave bias= out, and add the bias where the sum is made",
                        expression,
                        *pending.span,
                    )
            self.bias = _parameter(spec, self.sizes, expression, device, dtype)
            annotate(self, {"bias": _without_places(spec, self.sizes)})
            behind = [str(dim) for dim in result.dims]
            behind = (
                behind[behind.index("...") + 1 :] if "..." in behind else behind
            )  # a bias is broadcast over the rest
            ones = (dim if _names(parse_spec(dim)) <= _names(spec) else "1" for dim in behind)
            self.bias_expression = f"{_without_places(spec)} -> {_without_places(parse_spec(' '.join(map(str, ones))))}"
        self.open = _open_sizes((self.input, weight), self.sizes)
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the values anew."""
        bound = 1 / math.sqrt(max(1, self.fan_in))
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product of `x` and the weight, plus the bias."""
        y = einsum(x, self.weight, self.expression, sizes=self.open or None)
        return y if self.bias is None else y + rearrange(self.bias, self.bias_expression)

    def extra_repr(self) -> str:
        """The expression and the sizes."""
        return _shown(self.expression, self.sizes)


class Embedding(torch.nn.Module):
    """Rows of a table: `Embedding("b s, v d -> b s d", v=32_000, d=2048)`. As `axes.embedding`.

    Values are standard normal, and zero in the row of `padding_idx`, which also gets no gradient.
    """

    def __init__(
        self,
        expression: str,
        /,
        *,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **sizes: int,
    ) -> None:
        super().__init__()
        _, table, _ = _two(expression, "Embedding")
        self.expression, self.sizes = expression, sizes
        self.weight = _parameter(table, sizes, expression, device, dtype)
        self.rows = rows_of_table(expression)
        self.padding_idx = checked_padding(padding_idx, self.weight.shape[self.rows])
        annotate(self, {"weight": _without_places(table, sizes)})
        self.split = {name: sizes[name] for name in _split_names(table) if name in sizes}
        if not self.weight.is_meta:
            self.reset_parameters()

    @classmethod
    def from_module(cls, module: torch.nn.Embedding, expression: str, /) -> Embedding:
        """The layer that does the same as torch's, with its `weight` and its `padding_idx`.

        Raises `ShardingError` for a subclass, which may do more than look up rows, and for options that
        `axes.embedding` doesn't have.
        """
        kind = type(module)
        if kind is not torch.nn.Embedding:
            raise ShardingError(
                f"Embedding.from_module takes a torch.nn.Embedding; found {kind.__name__}, whose forward may do more "
                "than look up rows. Leave it in place: split its table along the other dim, like 'v d@tp', and gather "
                'what it gives: register_forward_hook(lambda module, _, y: axes.all_gather(y, "tp", dim=-1))'
            )
        for option, off in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(module, option) != off:
                raise ShardingError(f"axes.nn.Embedding has no {option}; found {option}={getattr(module, option)}")
        rows_of_table(expression)  # each dim of the table has a name, or this is an error
        _, table, _ = _two(expression, "Embedding")
        weight, names = module.weight, [str(dim.factors[0].name) for dim in table.dims]
        sizes = dict(zip(names, weight.shape, strict=False))
        made = cls(expression, padding_idx=module.padding_idx, device="meta", dtype=weight.dtype, **sizes)
        if made.weight.shape != weight.shape:
            raise SizeError(
                f"the table of '{expression}' is {list(made.weight.shape)}, the module's {list(weight.shape)}"
            )
        made.weight = weight
        return made.train(module.training)

    def reset_parameters(self) -> None:
        """Draw the values anew."""
        torch.nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight.select(self.rows, self.padding_idx).zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these indices."""
        return embedding(ids, self.weight, self.expression, None, self.padding_idx, **self.split)

    def extra_repr(self) -> str:
        """The expression, the padding and the sizes."""
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        return f"{self.expression!r}, {padding}{_shown('', self.sizes)}"


class _Norm(torch.nn.Module):
    """What both norms have: a spec of their input, the dims to work over, a weight with these dims."""

    weight: torch.nn.Parameter

    def __init__(self, spec: str, over: str | Sequence[str], sizes: dict[str, int], device: Any, dtype: Any):
        super().__init__()
        names = dims_to_work_over(over)
        tree = parse_spec(spec)
        for name in names:
            if name not in _names(tree):
                known = ", ".join(sorted(_names(tree)))
                raise ExpressionError(
                    f"a norm is over dims of the spec by name; found {shortened(name)}; known: {known}", spec
                )
        dims = [dim for dim in tree.dims if _names(Spec((dim,))) & set(names)]
        self.spec, self.over, self.sizes = spec, over, sizes
        self.parameter = Spec(tuple(dims))
        self.weight = _parameter(self.parameter, sizes, spec, device, dtype)
        annotate(self, {"weight": _without_places(self.parameter, sizes)})
        self.split = {name: sizes[name] for name in _split_names(self.parameter)}

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        torch.nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        """The spec, the dims and the sizes."""
        return f"{self.spec!r}, over={self.over!r}, {_shown('', self.sizes)}"


class RMSNorm(_Norm):
    """`RMSNorm("b s d", over="d", d=2048)`: as `axes.rms_norm`, with a weight of ones."""

    def __init__(
        self,
        spec: str,
        /,
        over: str | Sequence[str],
        eps: float | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **sizes: int,
    ):
        super().__init__(spec, over, sizes, device, dtype)
        checked_eps(eps)
        self.eps = eps
        if not self.weight.is_meta:
            self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` over the root of its mean square, times the weight."""
        return rms_norm(x, self.spec, self.over, self.weight, self.eps, None, **self.split)


class LayerNorm(_Norm):
    """`LayerNorm("b s d", over="d", d=2048)`: as `axes.layer_norm`, with a weight of ones and a bias of zeros."""

    def __init__(
        self,
        spec: str,
        /,
        over: str | Sequence[str],
        eps: float = 1e-5,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **sizes: int,
    ):
        super().__init__(spec, over, sizes, device, dtype)
        checked_eps(eps)
        self.eps = eps
        bias = checked_flag("LayerNorm: bias", bias)
        self.bias = _parameter(self.parameter, sizes, spec, device, dtype) if bias else None
        if bias:
            annotate(self, {"bias": _without_places(self.parameter, sizes)})
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        super().reset_parameters()
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with mean 0 and variance 1, times the weight, plus the bias."""
        return layer_norm(x, self.spec, self.over, self.weight, self.bias, self.eps, None, **self.split)


class Rearrange(torch.nn.Module):
    """`axes.rearrange` as a layer: `Rearrange("b s (h k) -> b h s k", k=64)`."""

    def __init__(self, expression: str, /, **sizes: int):
        super().__init__()
        _check_arrow("Rearrange", parse_tensor(expression), expression)
        self.expression, self.sizes = expression, sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` rearranged."""
        return rearrange(x, self.expression, sizes=self.sizes or None)

    def extra_repr(self) -> str:
        """The expression and the sizes."""
        return _shown(self.expression, self.sizes)


class Reduce(torch.nn.Module):
    """`axes.reduce` as a layer: `Reduce("b s d -> b d", "mean")`."""

    def __init__(self, expression: str, op: Literal["sum", "mean", "max", "min", "prod"], /, **sizes: int):
        super().__init__()
        _check_arrow("Reduce", parse_tensor(expression), expression)
        if not callable(op) and not (isinstance(op, str) and op in REDUCTIONS):
            raise ShardingError(f"axes.nn.Reduce knows {', '.join(REDUCTIONS)} and functions; found {shown(op)}")
        self.expression, self.op, self.sizes = expression, op, sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` reduced."""
        return reduce(x, self.expression, self.op, sizes=self.sizes or None)

    def extra_repr(self) -> str:
        """The expression, the reduction and the sizes."""
        return f"{self.expression!r}, {self.op!r}{', ' if self.sizes else ''}{_shown('', self.sizes)}"


class CrossEntropy(torch.nn.Module):
    """`axes.cross_entropy` as a layer: `CrossEntropy("b s v@tp, b s -> ", v=32_000)`."""

    def __init__(
        self,
        expression: str,
        /,
        reduction: Literal["mean", "sum"] = "mean",
        ignore_index: int = -100,
        **sizes: int,
    ):
        super().__init__()
        tree = parse_tensor(expression)
        if tree.results is None or len(tree.operands) != 2:
            raise ExpressionError(
                "axes.nn.CrossEntropy takes logits and labels, like 'b s v, b s ->'", expression, 0, len(expression)
            )
        self.ignore_index = checked_loss(reduction, ignore_index)
        self.expression, self.reduction, self.sizes = expression, reduction, sizes

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of labels."""
        return cross_entropy(logits, labels, self.expression, self.reduction, self.ignore_index, None, **self.sizes)

    def extra_repr(self) -> str:
        """The expression, the reduction and the sizes."""
        return f"{self.expression!r}, {self.reduction!r}{', ' if self.sizes else ''}{_shown('', self.sizes)}"


# expressions


def _two(expression: str, what: str) -> tuple[Spec, Spec, Spec]:
    tree = parse_tensor(expression)
    if len(tree.operands) != 2 or tree.results is None or len(tree.results) != 1:
        raise ExpressionError(f"{what} is 'input, weight -> result'", expression, 0, len(expression))
    return tree.operands[0], tree.operands[1], tree.results[0]


def _check_arrow(layer: str, tree: TensorExpression, expression: str) -> None:
    if tree.results is None:
        raise ExpressionError(
            f"axes.nn.{layer} takes an expression with two sides, like 'b s d -> s b d'", expression, 0, len(expression)
        )


def _names(spec: Spec) -> set[str]:
    return {factor.name for dim in spec.dims for factor in dim.factors if factor.name not in (None, "_", "...")}  # type: ignore[misc]


def _split_names(spec: Spec) -> list[str]:
    """The names that carry an `@`, whose sizes are whole."""
    return [str(factor.name) for dim in spec.dims for factor in dim.factors if factor.place or dim.place]


def _without_places(spec: Spec, sizes: Mapping[str, int] | None = None) -> str:
    """The logical names of a spec; those in groups with their `sizes`, which nobody has to give again."""
    dims = []
    for dim in spec.dims:
        known = sizes if sizes is not None and dim.grouped else {}
        factors = [replace(f, place=None, size=known.get(f.name)) if f.name else f for f in dim.factors]
        dims.append(replace(dim, factors=tuple(factors), place=None))
    return " ".join(map(str, dims))


def _size(name: str, sizes: dict[str, int], spec: Spec, text: str) -> int:
    """The size of a name, by keyword or inline."""
    inline = [factor.size for dim in spec.dims for factor in dim.factors if factor.name == name and factor.size]
    found = checked_size(name, sizes.get(name)) if name in sizes else next(iter(inline), None)
    if found is None:
        raise SizeError(f"{shortened(name)} needs a size, like {name}=8\nin  {text}")
    return found


def _parameter(
    spec: Spec, sizes: dict[str, int], text: str, device: Any, dtype: torch.dtype | None
) -> torch.nn.Parameter:
    """A parameter of these dims, without values."""
    shape = []
    for dim in spec.dims:
        numbers = [f.size or 1 if f.name is None else _size(f.name, sizes, spec, text) for f in dim.factors]
        shape.append(math.prod(numbers))
    return torch.nn.Parameter(torch.empty(shape, device=_checked_place(device), dtype=_checked_dtype(dtype)))


def _checked_dtype(dtype: object) -> torch.dtype | None:
    """`dtype`; `ShardingError` for what a parameter can't have."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
        raise ShardingError(f"the dtype of a parameter is one of floats, like torch.bfloat16; found {shown(dtype)}")
    return dtype


def _checked_place(device: Any) -> Any:
    """`device`, as torch writes it; `ShardingError` for what is none."""
    if device is None:
        return None
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # torch raises many kinds, also for devices that this machine hasn't
        why = str(error).partition("\n")[0][:200]
        raise ShardingError(f"device is a torch.device or like 'cuda'; found {shown(device)}: {why}") from None


def _open_sizes(operands: Sequence[Spec], sizes: dict[str, int]) -> dict[str, int]:
    """The sizes that the operands leave open: of each group those of all names but the major one.

    That one follows, from a shard as from the whole.
    """
    groups = [dim.factors for spec in operands for dim in spec.dims if dim.grouped]
    return {str(f.name): sizes[str(f.name)] for factors in groups for f in factors[1:] if f.name in sizes}


def _shown(expression: str, sizes: Mapping[str, int]) -> str:
    found = [*([repr(expression)] if expression else []), *(f"{name}={size}" for name, size in sizes.items())]
    return ", ".join(found)
