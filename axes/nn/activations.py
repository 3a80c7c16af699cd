"""Activations of modules that one doesn't own, resharded before and after.

axes.shard_module(model, specs, activations={"*.mlp": "b s@tp d -> b s@tp d"})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import ShardingError, suggestion
from axes.algebra.grammar import Spec, parse_tensor
from axes.algebra.logical import Rules
from axes.algebra.mesh import Mesh
from axes.algebra.name_patterns import NamePatterns
from axes.ops.reshard import reshard


def reshard_around(
    module: torch.nn.Module,
    activations: Mapping[str, str],
    mesh: Mesh,
    rules: Rules | None,
    sizes: Mapping[str, int],
) -> list[Callable[[], object]]:
    """What adds, to each module that a pattern matches, the hooks that reshard its inputs and outputs.

    Raises `ExpressionError` or `ShardingError` for text that isn't `inputs -> outputs`, and for patterns that match no
    module.
    """
    found: list[Callable[[], object]] = []
    names = dict(module.named_modules())
    for pattern, text in activations.items():
        tree = parse_tensor(text)
        if tree.results is None:
            raise ShardingError(f"activations of {pattern!r} are 'inputs -> outputs'; found '{text}'")
        table = NamePatterns([pattern])
        matching = [each for name, each in names.items() if table.first(name) is not None]
        if not matching:
            raise ShardingError(f"no module matches {pattern!r}{suggestion(pattern, names)}")
        before = _Around(tree.operands, "input", text, mesh, rules, dict(sizes))
        after = _Around(tree.results, "output", text, mesh, rules, dict(sizes))
        for each in matching:
            found.append(lambda each=each, before=before: each.register_forward_pre_hook(before.inputs))  # type: ignore[misc]
            found.append(lambda each=each, after=after: each.register_forward_hook(after.outputs))  # type: ignore[misc]
    return found


class _Around:
    """Hooks that reshard a module's tensors, in order, to these specs."""

    def __init__(
        self, specs: Sequence[Spec], what: str, text: str, mesh: Mesh, rules: Rules | None, sizes: dict[str, int]
    ):
        self.specs = tuple(map(str, specs))
        self.what, self.text, self.mesh, self.rules, self.sizes = what, text, mesh, rules, sizes

    def inputs(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A module's positional arguments, its tensors resharded."""
        return tuple(self._resharded(module, args))

    def outputs(self, module: torch.nn.Module, _: Any, result: Any) -> Any:
        """A module's result, its tensors resharded."""
        if isinstance(result, (tuple, list)):
            return type(result)(self._resharded(module, result))
        return self._resharded(module, (result,))[0]

    def _resharded(self, module: torch.nn.Module, values: Sequence[Any]) -> list[Any]:
        tensors = [at for at, value in enumerate(values) if isinstance(value, torch.Tensor)]
        if len(tensors) < len(self.specs):
            raise ShardingError(
                f"{type(module).__name__} has {len(tensors)} {self.what} tensors; "
                f"'{self.text}' is about {len(self.specs)}"
            )
        found = list(values)
        for at, spec in zip(tensors, self.specs, strict=False):
            x = found[at]
            if not isinstance(x, DTensor):
                raise ShardingError(
                    f"{self.what} {at} of {type(module).__name__} is a plain tensor; '{self.text}' reshards "
                    "DTensors, and axes.shard_map is for plain shards"
                )
            if self.rules is not None:
                spec = self.rules.spec(spec, self.mesh, tuple(x.shape), sizes=self.sizes)
            found[at] = reshard(x, spec, mesh=self.mesh)
        return found
