"""Layers whose dims have names, after einops' own `EinMix` and Flax's `Einsum`.

    class MLP(nn.Module):
        def __init__(self, embed, mlp):
            super().__init__()
            self.norm = axes.nn.RMSNorm("b s embed", over="embed", embed=embed)
            self.up = axes.nn.Einsum("b s embed, mlp embed -> b s mlp", embed=embed, mlp=mlp)
            self.down = axes.nn.Einsum("b s mlp@*, embed mlp@* -> b s embed", embed=embed, mlp=mlp)

        def forward(self, x):
            return x + self.down(F.silu(self.up(self.norm(x))))

A layer's expression names the dims of its parameter, and the layer is annotated with them: `axes.shard_module(model,
rules=axes.Rules(mlp="tp", embed=None))` needs no patterns. The same layer takes DTensors, a region's shards and whole
tensors. Where a region works on shards of a name, the expression says so with an `@`, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from axes import ShardingError, SizeError, einsum
from axes.extension import read, shown
from axes.nn.annotate import annotate
from axes.nn.functions import (
    Over,
    checked_padding,
    dims_worked_over,
    embedding,
    layer_norm,
    rms_norm,
    rows_of_table,
    three_specs,
)
from axes.nn.options import checked_sizes


class Named(torch.nn.Module):
    """A layer whose parameters' dims have names. `text` is its expression, `sizes` those of the names."""

    def __init__(self, text: str, sizes: Mapping[str, int]):
        super().__init__()
        self.text, self.sizes = text, checked_sizes(sizes)

    def parameter(self, spec: Any, device: Any, dtype: torch.dtype | None) -> torch.nn.Parameter:
        """A parameter of these dims, without values."""
        factors = [
            [f.size or 1 if f.name is None else self.size(f.name, spec) for f in dim.factors] for dim in spec.dims
        ]
        return torch.nn.Parameter(torch.empty(list(map(math.prod, factors)), device=device, dtype=dtype))

    def size(self, name: str, spec: Any) -> int:
        """The size of a name, by keyword or inline."""
        inline = [factor.size for dim in spec.dims for factor in dim.factors if factor.name == name and factor.size]
        found = self.sizes.get(name, next(iter(inline), None))
        if found is None:
            raise SizeError(f"{shown(name)} needs a size, like {name}=8\nin  {self.text}")
        return found

    def named(self, **specs: Any) -> None:
        """Annotate parameters with their logical names, and give them values unless they are deferred."""
        annotate(self, {name: _without_places(spec, self.sizes) for name, spec in specs.items()})
        if not any(parameter.is_meta for parameter in self.parameters()):
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the values anew."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The expression and the sizes."""
        return ", ".join([repr(self.text), *(f"{name}={size}" for name, size in self.sizes.items())])


class Einsum(Named):
    """A product with a weight, as a layer: `Einsum("b s d, (h k) d -> b s h k", h=32, k=64, d=2048)`. Like
    `torch.nn.Linear`.

    The second operand is the weight. Its names have sizes, as keywords or in the text. Values are uniform, within
    the root of 1 / the number of products that are added up. A bias is a parameter of yours: `y +
    axes.rearrange(bias, "f -> 1 1 f")`.

    Raises:
        ExpressionError: The text isn't `input, weight -> result`.
        SizeError: A name of the weight has no size.

    Examples:
        >>> import axes
        >>> axes.nn.Einsum("b d, f d -> b f", f=8, d=4)(torch.ones(2, 4)).shape
        torch.Size([2, 8])
    """

    def __init__(self, expression: str, /, *, device: Any = None, dtype: torch.dtype | None = None, **sizes: int):
        operand, weight, result = three_specs("Einsum", expression, "input, weight -> result")
        super().__init__(expression, sizes)
        self.weight = self.parameter(weight, device, dtype)
        self.fan_in = math.prod(self.size(name, weight) for name in _names(weight) - _names(result))
        # Of each group the sizes of all names but the major one, which follows from a shard as from the whole.
        groups = [dim.factors for spec in (operand, weight) for dim in spec.dims if dim.grouped]
        self.open = {str(f.name): self.sizes[str(f.name)] for factors in groups for f in factors[1:] if f.name in sizes}
        self.named(weight=weight)

    def reset_parameters(self) -> None:
        """Draw the values anew."""
        bound = 1 / math.sqrt(max(1, self.fan_in))
        torch.nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product of `x` and the weight."""
        return einsum(x, self.weight, self.text, sizes=self.open or None)


class Embedding(Named):
    """Rows of a table, as a layer: `Embedding("b s, v d -> b s d", v=32_000, d=2048)`. Like `torch.nn.Embedding`.

    Values are standard normal, and zero in the row of `padding_idx`, which gets no gradient. `Embedding.from_module`
    takes over the weight of torch's layer.

    Raises:
        ExpressionError: The text isn't `indices, table -> result`.
        SizeError: A name of the table has no size.

    Examples:
        >>> import axes
        >>> axes.nn.Embedding("b, v d -> b d", v=10, d=4)(torch.tensor([1, 2])).shape
        torch.Size([2, 4])
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
        _, table, _ = three_specs("Embedding", expression, "ids, table -> rows")
        super().__init__(expression, sizes)
        self.weight = self.parameter(table, device, dtype)
        self.rows = rows_of_table(expression)
        self.padding_idx = None if padding_idx is None else checked_padding(padding_idx, self.weight.shape[self.rows])
        self.whole = _sizes_of(_names(read(str(table.dims[self.rows])).spec), self.sizes)
        self.named(weight=table)

    @classmethod
    def from_module(cls, module: torch.nn.Embedding, expression: str, /) -> Embedding:
        """The layer that does the same as torch's, with its `weight` and its `padding_idx`.

        Raises `ShardingError` for a subclass, which may do more than look up rows, and for options that
        `axes.embedding` doesn't have.
        """
        if (
            type(module) is not torch.nn.Embedding
            or module.max_norm is not None
            or module.scale_grad_by_freq
            or module.sparse
        ):
            raise ShardingError(
                f"Embedding.from_module takes a torch.nn.Embedding without further options; found {module}, whose "
                "forward may do more than look up rows. Leave it in place: split its table along the other dim, like "
                "'v d@tp', and gather what it gives: "
                'register_forward_hook(lambda module, _, y: axes.all_gather(y, "tp", dim=-1))'
            )
        _, table, _ = three_specs("Embedding", expression, "ids, table -> rows")
        weight, names = module.weight, [str(dim.factors[0].name) for dim in table.dims]
        sizes = dict(zip(names, weight.shape, strict=False))
        made = cls(expression, padding_idx=module.padding_idx, device="meta", dtype=weight.dtype, **sizes)
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
        return embedding(ids, self.weight, self.text, None, self.padding_idx, **self.whole)

    def extra_repr(self) -> str:
        """The expression, the sizes and the padding."""
        return super().extra_repr() + ("" if self.padding_idx is None else f", padding_idx={self.padding_idx}")


class RMSNorm(Named):
    """`axes.rms_norm` as a layer, with a weight of ones: `RMSNorm("b s d", over="d", d=2048)`. Like `torch.nn.RMSNorm`.

    Raises:
        SizeError: A name in `over` has no size.

    Examples:
        >>> import axes
        >>> axes.nn.RMSNorm("b d", over="d", d=4)(torch.full((2, 4), 3.0))[0].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        spec: str,
        /,
        over: Over,
        eps: float | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **sizes: int,
    ):
        super().__init__(spec, sizes)
        self.over, self.eps, own = over, eps, read(dims_worked_over(spec, over)).spec
        self.weight, self.whole = self.parameter(own, device, dtype), _sizes_of(_names(own), self.sizes)
        self.named(weight=own)

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        torch.nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` over the root of its mean square, times the weight."""
        return rms_norm(x, self.text, self.over, self.weight, self.eps, None, **self.whole)


class LayerNorm(Named):
    """`axes.layer_norm` as a layer, with a weight of ones and a bias of zeros: `LayerNorm("b s d", over="d", d=2048)`.
    Like `torch.nn.LayerNorm`.

    Raises:
        SizeError: A name in `over` has no size.

    Examples:
        >>> import axes
        >>> axes.nn.LayerNorm("b d", over="d", d=2, eps=0.0)(torch.tensor([[1.0, 3.0]]))[0].tolist()
        [-1.0, 1.0]
    """

    def __init__(
        self,
        spec: str,
        /,
        over: Over,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **sizes: int,
    ):
        super().__init__(spec, sizes)
        self.over, self.eps, own = over, eps, read(dims_worked_over(spec, over)).spec
        self.weight, self.whole = self.parameter(own, device, dtype), _sizes_of(_names(own), self.sizes)
        self.bias = self.parameter(own, device, dtype) if bias else None
        self.named(weight=own, **({"bias": own} if bias else {}))

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with mean 0 and variance 1, times the weight, plus the bias."""
        return layer_norm(x, self.text, self.over, self.weight, self.bias, self.eps, None, **self.whole)


# expressions


def _names(spec: Any) -> set[str]:
    return {factor.name for dim in spec.dims for factor in dim.factors if factor.name not in (None, "_", "...")}  # type: ignore[misc]


def _sizes_of(names: Iterable[str], sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: sizes[name] for name in names if name in sizes}


def _without_places(spec: Any, sizes: Mapping[str, int]) -> str:
    """The logical names of a spec; those in groups with their `sizes`, which nobody has to give again."""
    dims = []
    for dim in spec.dims:
        known = sizes if dim.grouped else {}
        factors = [replace(f, place=None, size=known.get(f.name)) if f.name else f for f in dim.factors]
        dims.append(replace(dim, factors=tuple(factors), place=None))
    return " ".join(map(str, dims))
