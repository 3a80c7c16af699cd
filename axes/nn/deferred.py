"""Deferred parameters: made shard by shard, with values that don't depend on the mesh.

A module built on the device `meta` has shapes and no values. `made_by_initializers` gives the modules' own
`reset_parameters` DTensors to fill; what they draw at random is drawn from a seed, the parameter's name and an
element's place in the whole parameter alone. So one device, eight ranks and another eight ranks have the same
model, and no rank ever holds more than its shards.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from axes.algebra.errors import ShardingError
from axes.extension import draw
from axes.runtime import torch_private
from axes.runtime.factories import positions
from axes.runtime.sharded import sharding_of, take_shard


def made_by_initializers(
    root: torch.nn.Module,
    deferred: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor],
    seeds: Mapping[str, int],
) -> None:
    """Fill the tensors of `deferred`, by whole name, by what their modules do to initialize them.

    The root's `init_weights()` comes first, where it has one. Each module that holds a tensor which isn't filled by
    then is asked to `reset_parameters()`; of a tied tensor the first module that fills it does so, and `others`, which
    have values, keep them. `seeds` has all their names. Raises `ShardingError` with the names that nothing has filled.
    """
    recorder = _Recorder({**others, **deferred}, frozenset(others), seeds)
    with torch.no_grad(), recorder, recorder.aliases:
        whole = getattr(root, "init_weights", None)
        if callable(whole):
            whole()
        for module in _holders(root, (tensor for name, tensor in deferred.items() if name not in recorder.filled)):
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if callable(reset):
                recorder.closed = recorder.closed | recorder.filled
                reset()
    missing = [name for name in deferred if name not in recorder.filled and not _taken_over(root, name, deferred[name])]
    if missing:
        raise ShardingError(
            f"no initializer makes  {', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}\n"
            "the modules that hold them have no reset_parameters() that fills them, and the root no init_weights(); "
            "write one, or make the module on a device"
        )


def _taken_over(root: torch.nn.Module, name: str, made: torch.Tensor) -> bool:
    """Take the shard of a whole tensor that an initializer has put in the place of a deferred one, if it has."""
    path, _, own = name.rpartition(".")
    holder = root.get_submodule(path)
    places: dict[str, Any] = holder._parameters if own in holder._parameters else holder._buffers
    there = places.get(own)
    if there is None or there is made or isinstance(there, DTensor) or there.is_meta or there.shape != made.shape:
        return False
    with torch.no_grad():
        torch_private.local_of(made).copy_(take_shard(there.detach(), sharding_of(made)))
    places[own] = made
    return True


def _holders(root: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """The modules that hold one of the tensors themselves, each once."""
    wanted = {id(tensor) for tensor in tensors}
    found = []
    for module in root.modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(id(tensor) in wanted for tensor in own):
            found.append(module)
    return found


class _Recorder(torch_private.DispatchMode):
    """Sees what is written into deferred tensors, and draws their random values by place."""

    def __init__(self, named: Mapping[str, torch.Tensor], closed: frozenset[str], seeds: Mapping[str, int]):
        super().__init__()
        self.aliases = _Aliases({id(tensor): name for name, tensor in named.items()})
        self.parts: dict[int, _Written] = {}
        self.draws: Counter[str] = Counter()
        self.filled: set[str] = set()
        self.closed = closed
        self.last = ""  # what is drawn beside a parameter counts from it: ranks may try again unequally often
        self.seeds = seeds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if not isinstance(x, DTensor):
            return func(*args, **kwargs)
        name, part = self.aliases.names.get(id(x)), self.parts.get(id(x))
        word = func.__name__.partition(".")[0]
        if word in _LIKE:
            return self._drawn(f"~{name or self.last}", _LIKE[word], func(*args, **kwargs))
        if not word.endswith("_"):
            result = func(*args, **kwargs)
            if word in _VIEWS and (name is not None or part is not None):
                self._note(result, name, part, word, args)
            return result
        if name is None and part is not None:
            return x if part.name in self.closed else self._written(part, word, *args, **kwargs)
        if name in self.closed:
            return x
        if name is not None:
            self.filled.add(name)
            self.last = name
        if word in _OTHER_DRAWS:
            raise ShardingError(
                f"{word} of {name or 'a tensor'}: random values that are the same on every mesh are drawn by uniform_ "
                "and normal_"
            )
        if word in _DRAWS:
            return self._drawn(name or f"~{self.last}", word, *args, **kwargs)
        if word == "copy_" and not isinstance(args[1], DTensor) and args[1].shape == x.shape:
            torch_private.local_of(x).copy_(take_shard(args[1], sharding_of(x)))
            return x
        return func(*args, **kwargs)

    def _note(self, result: Any, name: str | None, part: _Written | None, word: str, args: tuple[Any, ...]) -> None:
        """Remember what a view of a deferred tensor is a part of; positions where a number can be written there."""
        where = None
        if name is not None and word in ("select", "slice"):
            where = _positions(word, *args)
        whole = name or (part.name if part is not None else "")
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            self.parts[id(tensor)] = _Written(whole, args[0], where, tensor)

    def _written(self, part: _Written, word: str, x: DTensor, *given: Any, **_: Any) -> DTensor:
        """`x.fill_(value)` where `x` is a part of a parameter, as torch writes the padding of an embedding.

        torch takes a part of what is split from a gathered copy, and loses what is written there.
        """
        if word not in ("fill_", "zero_") or part.positions is None:
            raise ShardingError(
                f"{word} of a part of {part.name}: an initializer draws and fills a whole parameter, or fills rows or "
                "columns of one with a number"
            )
        dim, wanted = part.positions
        local, sharding = torch_private.local_of(part.whole), sharding_of(part.whole)
        if sharding.mesh.coordinate is not None:
            mine = positions(sharding.local_indices(tuple(part.whole.shape))[dim], local.device)
            at = torch.isin(mine, torch.tensor(list(wanted), device=local.device)).nonzero().view(-1)
            local.index_fill_(dim, at, float(given[0]) if given else 0.0)
        self.filled.add(part.name)
        return x

    def _drawn(
        self, name: str, word: str, x: DTensor, first: float = 0.0, second: float = 1.0, generator: object = None
    ) -> DTensor:
        """`uniform_` or `normal_` of a parameter."""
        self.draws[name] += 1
        seed = self.seeds.get(name.lstrip("~"), next(iter(self.seeds.values())))
        text = f"{seed} {name} {self.draws[name]}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
        local, sharding = torch_private.local_of(x), sharding_of(x)
        if sharding.mesh.coordinate is not None:
            draw(local, sharding, tuple(x.shape), seed, _DRAWS[word])
            local.mul_(second - first if word == "uniform_" else second).add_(first)
        return x


@dataclass(frozen=True)
class _Written:
    """A part of a deferred parameter: `(dim, positions)` of the whole, where it is rows or columns.

    Its tensor is kept: it is found by identity.
    """

    name: str
    whole: DTensor
    positions: tuple[int, range] | None
    tensor: torch.Tensor


def _positions(
    word: str, x: DTensor, dim: int = 0, first: int | None = 0, stop: int | None = None, step: int = 1
) -> tuple[int, range]:
    """The dim of `x` and its positions that `select` or `slice` take."""
    whole = range(x.shape[dim])
    if word == "slice":
        return dim % x.ndim, whole[slice(first, stop, step)]
    at = whole[first or 0]
    return dim % x.ndim, range(at, at + 1)


class _Aliases(TorchFunctionMode):
    """The names of deferred tensors, by identity: their `.data` and `.detach()` are the same tensors."""

    def __init__(self, names: dict[int, str]):
        super().__init__()
        self.names = names
        self.kept: list[torch.Tensor] = []  # an identity is that of a tensor which lives

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = self.names.get(id(args[0])) if args else None
        if name is not None and isinstance(result, DTensor) and result is not args[0] and _is_same(result, args[0]):
            self.names[id(result)] = name
            self.kept.append(result)
        return result


_DRAWS: dict[str, Literal["uniform", "normal"]] = {"uniform_": "uniform", "normal_": "normal"}
_LIKE = {"rand_like": "uniform_", "randn_like": "normal_"}
_VIEWS = frozenset(
    [
        "select",
        "slice",
        "t",
        "transpose",
        "permute",
        "view",
        "reshape",
        "_unsafe_view",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "diagonal",
        "unsqueeze",
        "squeeze",
        "expand",
        "as_strided",
        "narrow",
    ]
)
_OTHER_DRAWS = frozenset({"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "random_"})


def _is_same(one: DTensor, other: DTensor) -> bool:
    """Whether one tensor is the other by another name."""
    if one.shape != other.shape:
        return False
    mine, theirs = torch_private.local_of(one), torch_private.local_of(other)
    return mine.shape == theirs.shape and mine.data_ptr() == theirs.data_ptr()
