"""The tensors in what a region is given and gives: nested values taken apart, and specs by name.

    tree = taken_apart(((x, 3), {"mask": y}), refuse)         # `refuse` is called with what else isn't known
    tree.tensors                                               # [x, y]
    tree.holding([a, b])                                       # ((a, 3), {"mask": b})

Nested are tuples, lists and dicts in their own order, and what torch's pytree knows. Arguments that may be absent, and
results that have names, have specs by name:

    model = axes.shard_map(model, "b@dp s ->", attention_mask="b@dp s", results={"logits": "b@dp s v@tp"})

Each call has an expression of its own, with a spec for each tensor that is passed and that comes back. With a mask it
is `"b@dp s, b@dp s -> b@dp s v@tp"`.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ExpressionError, ShardingError, shortened, suggestion
from axes.algebra.grammar import Spec, parse_spec
from axes.algebra.sizes import checked_texts
from axes.ops.regions import read_region
from axes.runtime import torch_private
from axes.runtime.graphs import read_once

_PASSES = (type(None), bool, int, float, str)


class Tree(NamedTuple):
    """A nested value, taken apart: its leaves, which of them are tensors, and what puts leaves together."""

    leaves: list[Any]
    tensors: list[torch.Tensor]
    structure: Any

    def holding(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same tree with other tensors, in order."""
        leaves, others = list(self.leaves), iter(tensors)
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[at] = next(others)
        return torch_private.put_together(leaves, self.structure)


def taken_apart(tree: Any, check: Callable[[Any], None], what: str = "an argument of a region") -> Tree:
    """A tree by its leaves. `check` is given what else there is in it; `ShardingError` for a tree without an end."""
    try:
        leaves, structure = torch_private.take_apart(tree)
    except RecursionError:
        raise ShardingError(f"{what} holds itself, or is nested too deep") from None
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif type(leaf) not in _PASSES:
            check(leaf)
    return Tree(leaves, tensors, structure)


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there are tensors, all of them plain."""
    return bool(tensors) and DTensor not in map(type, tensors)


# --- what may be no part of a tree


_NO_TREES = (
    numbers.Number,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)
"""What is no tree and holds no tensors; the first for speed."""

_TREES = (
    "tuples, lists, dicts, or what torch's pytree knows, like a dataclass after torch.export.register_dataclass(...)"
)


def check_result(passed: Sequence[object], part: Any) -> None:
    """Refuse what a function has returned beside tensors, but for numbers, text, and the arguments that it `passed`."""
    if not isinstance(part, _NO_TREES) and not any(part is each for each in passed):
        raise ShardingError(
            f"the function returned a value of type {_named(part)}, in which a region can't see tensors; return "
            f"tensors, numbers and text in {_TREES}; or make the {type(part).__name__} outside and pass it: an "
            "argument may be returned"
        )


def _named(part: object) -> str:
    kind = type(part)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# --- specs by name


Texts = tuple[tuple[str, str], ...]
"""Names, each with its spec."""


@dataclass(frozen=True)
class NamedSpecs:
    """Specs of arguments, and of results where these are asked for by name. `order`: parameters by position."""

    arguments: Texts = ()
    results: Texts | None = None
    order: tuple[str, ...] = ()

    def of_call(self, expression: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The expression with a spec for each tensor among the arguments, and with all results that may come."""
        parts = [*zip([*self.order, *[""] * len(args)], args, strict=False), *kwargs.items()]
        known = [name for name, _ in self.arguments]
        names = tuple([name if name in known else "" for name in names_of_tensors(parts)])
        return _of_call(expression, self.arguments, self.results, names)

    def of_results(self, expression: str, result: object) -> str:
        """The expression of a call with a spec for each tensor that has come."""
        specs, names = dict(self.results or ()), names_of_tensors(_fields(result))
        for name in names:
            if name not in specs:
                raise ShardingError(
                    f"the function returned tensors by the name {shortened(name)}, which results= doesn't have"
                    f"{suggestion(name, specs)}; give them a spec"
                )
        return f"{expression.partition('->')[0]}-> {', '.join([specs[name] for name in names])}"


def named_specs(
    fn: Callable[..., Any], expression: str, arguments: Mapping[str, str], results: Mapping[str, str] | None
) -> NamedSpecs:
    """What `shard_map` is told by name."""
    if not arguments and results is None:
        return NamedSpecs()
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # of a builtin nobody knows the names
        parameters = []
    if not torch.compiler.is_compiling():
        _check(parameters, expression, arguments, results)
    order = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return NamedSpecs(tuple(arguments.items()), None if results is None else tuple(results.items()), tuple(order))


def _check(
    parameters: list[inspect.Parameter],
    expression: str,
    arguments: Mapping[str, str],
    results: Mapping[str, str] | None,
) -> None:
    checked_texts("keywords of shard_map are specs of arguments", arguments, "attention_mask='b@dp s'")
    checked_texts("results= are specs by name", results or {}, "{'logits': 'b@dp s v@tp'}")
    for text in (*arguments.values(), *(results or {}).values()):
        parse_spec(text)
    if results is not None and read_region(expression).outputs != (Spec(()),):
        at = expression.index("->") + 2
        raise ExpressionError("results= asks for results by name; leave the right side empty", expression, at)
    known = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for name in arguments:
        if parameters and name not in known and all(p.kind != p.VAR_KEYWORD for p in parameters):
            raise ShardingError(
                f"{name}= is no option of shard_map, and the function has no parameter "
                f"{shortened(name)}{suggestion(name, [*known, 'mesh', 'check', 'results'])}"
            )


def names_of_tensors(parts: Iterable[tuple[str, object]]) -> list[str]:
    """The name of each tensor in parts with names."""
    return [name for name, part in parts for _ in taken_apart(part, lambda part: None).tensors]


def _fields(result: object) -> Iterable[tuple[str, object]]:
    """What a function has returned, by name and in order."""
    if isinstance(result, Mapping):
        return result.items()
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return zip(result._fields, result, strict=True)
    if dataclasses.is_dataclass(result):
        return [(field.name, getattr(result, field.name)) for field in dataclasses.fields(result)]
    raise ShardingError(
        f"results= asks for results by name, in a dict, a named tuple or a dataclass; the function returned "
        f"{type(result).__name__}"
    )


@read_once
def _of_call(expression: str, arguments: Texts, results: Texts | None, names: tuple[str, ...]) -> str:
    """`names`: of each tensor that is passed, under which its spec is; nothing where that is on the left side."""
    left, _, right = expression.partition("->")
    named, own = dict(arguments), iter(left.split(",") if left.strip() or "" in names else ())
    found = [named[name] if name else next(own, None) for name in names]
    inputs = ", ".join([spec for spec in (*found, *own) if spec is not None])
    return f"{inputs} -> {right if results is None else ', '.join([spec for _, spec in results])}"
