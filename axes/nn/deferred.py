"""Deferred parameters: made shard by shard, with values that don't depend on the mesh.

A module built on the device `meta` has shapes and no values. `made_by_initializers` gives the modules' own
`reset_parameters` DTensors to fill; what they draw at random is drawn from a seed, the parameter's name and an
element's place in the whole parameter alone. So one device, eight ranks and another eight ranks have the same
model, and no rank ever holds more than its shards.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from axes import ShardingError, sharding_of
from axes.extension import boxes, draw, local, torch_private
from axes.nn.module_tensors import fill


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
    with torch.no_grad(), recorder:
        whole = getattr(root, "init_weights", None)
        if callable(whole):
            whole()
        for module in root.modules():
            own = {id(x) for x in (*module._parameters.values(), *module._buffers.values())}
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if callable(reset) and any(id(x) in own for name, x in deferred.items() if name not in recorder.filled):
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
    fill(made, there.detach())
    places[own] = made
    return True


Part = tuple[str, DTensor, str, tuple[Any, ...]]
"""A view of a part: the name of the deferred tensor, the tensor, and the operation that takes the part, with how."""


class _Recorder(torch_private.DispatchMode):
    """Sees what is written into deferred tensors, and draws their random values by place."""

    def __init__(self, named: Mapping[str, torch.Tensor], closed: frozenset[str], seeds: Mapping[str, int]):
        super().__init__()
        self.names = {id(tensor): name for name, tensor in named.items()}
        self.kept: list[torch.Tensor] = []  # an identity is that of a tensor which lives
        self.parts: dict[int, Part] = {}
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
        name, part = self.names.get(id(x)), self.parts.get(id(x))
        word = func.__name__.partition(".")[0]
        if word in _LIKE:
            return self._drawn(f"~{name or self.last}", _LIKE[word], func(*args, **kwargs))
        if not word.endswith("_"):
            result = func(*args, **kwargs)
            owner = name or (part[0] if part is not None else None)
            if func.is_view and owner is not None:  # `.data` is one as well, a detach
                self._note(result, x, owner, name is not None, word, args[1:])
            return result
        if name is None and part is not None:
            return x if part[0] in self.closed else self._written(part, word, *args, **kwargs)
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
            fill(x, args[1])
            return x
        return func(*args, **kwargs)

    def _note(self, result: Any, x: DTensor, name: str, is_whole: bool, word: str, how: tuple[Any, ...]) -> None:
        """Remember views of a tensor: the same by another name, or a part of it."""
        for view in result if isinstance(result, (list, tuple)) else [result]:
            self.kept.append(view)
            if is_whole and view.shape == x.shape and view.stride() == x.stride():
                self.names[id(view)] = name
            else:
                self.parts[id(view)] = name, x, word if is_whole else "part", how

    def _written(self, part: Part, word: str, x: DTensor, *given: Any, **_: Any) -> DTensor:
        """`x.fill_(value)` where `x` is a part of a parameter, as torch writes the padding of an embedding.

        torch takes a part of what is split from a gathered copy, and loses what is written there.
        """
        name, whole, view, how = part
        if word not in ("fill_", "zero_") or view not in ("select", "slice"):
            raise ShardingError(
                f"{word} of a part of {name}: an initializer draws and fills a whole parameter, or fills rows or "
                "columns of one with a number"
            )
        dim, *where = how
        every = range(whole.shape[dim])
        wanted = every[slice(*where)] if view == "slice" else [every[where[0]]]
        for box in boxes(whole):
            here = [at - box.offsets[dim] for at in wanted if 0 <= at - box.offsets[dim] < box.sizes[dim]]
            rows = torch.tensor(here, dtype=torch.int64, device=whole.device)
            box.within(local(whole)).index_fill_(dim, rows, float(given[0]) if given else 0.0)
        self.filled.add(name)
        return x

    def _drawn(
        self, name: str, word: str, x: DTensor, first: float = 0.0, second: float = 1.0, generator: object = None
    ) -> DTensor:
        """`uniform_` or `normal_` of a parameter."""
        self.draws[name] += 1
        seed = self.seeds.get(name.lstrip("~"), next(iter(self.seeds.values())))
        text = f"{seed} {name} {self.draws[name]}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
        shard, sharding = local(x), sharding_of(x)
        if sharding.mesh.coordinate is not None:
            draw(shard, sharding, tuple(x.shape), seed, _DRAWS[word])
            shard.mul_(second - first if word == "uniform_" else second).add_(first)
        return x


_DRAWS: dict[str, Literal["uniform", "normal"]] = {"uniform_": "uniform", "normal_": "normal"}
_LIKE = {"rand_like": "uniform_", "randn_like": "normal_"}
_OTHER_DRAWS = frozenset({"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "random_"})
