"""Sharding a module's parameters: by patterns, by annotations, whatever the model is.

    axes.shard_module(model, {"*.wq.weight": "(heads head_dim) embed", "*": "..."}, rules=rules, heads=32)

The module stays the one that it was: its parameters are replaced by DTensors, in place, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from axes.algebra.errors import AxesError, ShardingError
from axes.algebra.logical import Rules, ambient_rules, checked_rules
from axes.algebra.mesh import Mesh, checked_mesh, required_mesh
from axes.algebra.name_patterns import NamePatterns
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_flag, checked_texts, given_sizes, written_sizes
from axes.extension import dtensor, read, shown, suggestion
from axes.nn.annotations import annotated, tensors_of
from axes.nn.deferred import made_by_initializers
from axes.ops.module_regions import note_sharded
from axes.runtime.factories import agreed_seeds
from axes.runtime.leaves import resolving
from axes.runtime.sharded import sharding_in_torch, take_shard

M = TypeVar("M", bound=torch.nn.Module)

_OTHERS = "*"
"""The pattern that matches every name."""

_WHOLE = "..."
"""The spec of a buffer that nobody mentions: every rank has all of it."""


@dataclass(frozen=True)
class _Placed:
    """A tensor of the module: its names (several where it is tied), its spec, and its sharding on the mesh.

    said: who gave the spec, a pattern or "annotation"; nothing for a buffer that stays whole unmentioned.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    logical: str
    said: str
    sharding: Sharding

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.sharding.local_shape(tuple(self.tensor.shape))

    @property
    def local_bytes(self) -> int:
        return math.prod(self.local_shape) * self.tensor.itemsize


def shard_module(
    module: M,
    specs: Mapping[str, str] | None = None,
    mesh: Mesh | Mapping[str, Mesh] | None = None,
    rules: Rules | None = None,
    dry_run: bool = False,
    *,
    sizes: Mapping[str, int] | None = None,
    **keywords: int,
) -> M:
    """Shard the parameters and buffers of a module in place; returns the module.

    `specs` maps patterns of whole names (as of `fnmatch`: `*` is any text) to specs; the first that matches applies,
    before annotations (`axes.annotate`). With rules, passed or ambient, specs are in logical names; without, in axes
    of the mesh (`"(heads head_dim)@tp embed"`). Keywords are sizes of names in groups. Every parameter has to be
    covered; a buffer that isn't is replicated. Tied parameters stay tied, and so do shared modules. A pattern may be of
    a parameter that the module has registered as None: a bias that it lacks, or what is on another pipeline stage.

    `mesh` is the ambient mesh by default. A model on several meshes, such as experts beside dense layers, gives
    patterns of names here as well, the first that matches applies: `{"*.experts.*": mesh["ep"], "*": mesh["tp"]}`.

    Parameters with values: every rank has the whole module, and keeps a copy of its shards. Parameters on the device
    `meta`: each rank makes its shards, by the modules' `reset_parameters()` or the root's `init_weights()`; what
    these draw at random follows from torch's seed on the first rank, the parameter's name and the place in it, and so
    is the same on every mesh.

    With `dry_run` nothing changes: a table is printed of parameters, specs, shapes and bytes on this rank.

    Raises `ShardingError` with the names of uncovered parameters, of patterns that match nothing or stand behind a
    wider one, of a rule about no dim that is called nearly like one without a rule, of tied names with two specs, of
    parameters that are sharded already, that have no mesh or that no initializer makes; before anything is changed,
    but for the last.

        with torch.device("meta"):
            model = Transformer(config)
        axes.shard_module(model, {"*.wq.weight": "(heads head_dim)@tp embed", "*": "..."}, mesh=mesh, heads=32)
    """
    if not isinstance(module, torch.nn.Module):
        raise ShardingError(f"axes.shard_module takes a module; found {type(module).__name__}")
    meshes = _meshes(mesh)
    rules = ambient_rules() if rules is None else checked_rules(rules, "axes.shard_module")
    given = dict(written_sizes(keywords, sizes))
    if specs is not None:
        checked_texts("specs map patterns of names to specs", specs, "{'*.weight': 'f d'}")
    dry_run = checked_flag("dry_run", dry_run)
    if not dry_run:
        for each in meshes.values():
            each._bound("axes.shard_module")
    entries = _entries(module, specs or {}, meshes, rules, given)
    if dry_run:
        print(_table(entries, meshes, rules))
        return module
    deferred: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for entry in entries:
            made = _made(entry)
            for name in entry.names:
                owner, own = _holder(module, name)
                is_parameter = own in owner._parameters
                (owner._parameters if is_parameter else owner._buffers)[own] = made  # type: ignore[index]
                if is_parameter or entry.sharding.used:  # a buffer that every rank has whole may be a plain one as well
                    note_sharded(owner, own, str(entry.sharding.spec))
            (deferred if entry.tensor.is_meta else others)[entry.names[0]] = made
    if deferred:
        seeds = agreed_seeds(meshes.values())
        by_name = {entry.names[0]: seeds[entry.sharding.mesh] for entry in entries}
        made_by_initializers(module, deferred, others, by_name)
    return module


def _meshes(mesh: Mesh | Mapping[str, Mesh] | None) -> dict[str, Mesh]:
    """The mesh of each pattern of names; one mesh is that of all names."""
    if not isinstance(mesh, Mapping):
        return {_OTHERS: required_mesh(mesh, "axes.shard_module")}
    if not mesh:
        raise ShardingError("axes.shard_module: mesh={} names no mesh; write a mesh, or {'*': mesh}")
    if not all(isinstance(pattern, str) for pattern in mesh):
        raise ShardingError(f"axes.shard_module: mesh maps patterns of names to meshes; found {shown(mesh)}")
    return {pattern: checked_mesh(each) for pattern, each in mesh.items()}


def _entries(
    module: torch.nn.Module,
    specs: Mapping[str, str],
    meshes: Mapping[str, Mesh],
    rules: Rules | None,
    sizes: dict[str, int],
) -> list[_Placed]:
    """Every tensor of the module with what is said of it."""
    own = annotated(module)
    tables = NamePatterns(specs), NamePatterns(meshes)
    by_id: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in tensors_of(module):
        by_id.setdefault(id(tensor), (tensor, []))[1].append(name)
    parameters = {id(p) for p in module.parameters()}
    used: set[str] = set()
    found, uncovered, needed = [], [], set()
    without_mesh: list[str] = []
    for tensor, names in by_id.values():
        if isinstance(tensor, DTensor):
            raise ShardingError(
                f"{names[0]} is sharded already; shard_module takes a module of plain tensors. Say all specs in one "
                "call, or make the module anew"
            )
        said = _said(names, specs, tables[0], own)
        used.update(pattern for _, pattern in said.values())
        if not said and id(tensor) in parameters:
            uncovered.append(f"  {' = '.join(names)}  {list(tensor.shape)}")
            continue
        homes = {name: pattern for name in names if (pattern := tables[1].first(name)) is not None}
        used.update(homes.values())
        if len({meshes[pattern] for pattern in homes.values()}) > 1:
            each = "\n".join(f"  {name}  {meshes[pattern]!r}" for name, pattern in homes.items())
            raise ShardingError(f"one tensor under {len(names)} names, tied, has two meshes:\n{each}\ngive it one")
        mesh = next((meshes[pattern] for pattern in homes.values()), None)
        if mesh is None:
            without_mesh.append(f"  {' = '.join(names)}  {list(tensor.shape)}")
            continue
        ways = []
        for name, (spec, who) in (said or {names[0]: (_WHOLE, "")}).items():
            mine = {each: size for each, size in sizes.items() if each in _names(spec)}
            needed |= set(mine)
            sharding = _sharding(module, name, tensor, (spec, who), mesh, rules, mine)
            ways.append(_Placed(tuple(names), tensor, spec, who, sharding))
        if not all(way.sharding.is_equivalent(ways[0].sharding, tuple(tensor.shape)) for way in ways):
            each = "\n".join(f"  {name}  {spec}    ({who})" for name, (spec, who) in said.items())
            raise ShardingError(f"one tensor under {len(names)} names, tied, has two specs:\n{each}\ngive it one")
        found.append(ways[0])
    if without_mesh:
        raise ShardingError(
            "no pattern of mesh= is about\n" + "\n".join(without_mesh) + "\n"
            "name them, or say where all others are: {..., '*': mesh}"
        )
    if uncovered:
        raise ShardingError(
            "no pattern or annotation is about\n" + "\n".join(uncovered) + "\n"
            "name them, or say of all others that they are whole on every rank: {..., '*': '...'}"
        )
    known = [name for _, names in by_id.values() for name in names]
    every = [*known, *_names_of_nothing(module)]
    matched = {table.patterns[number] for table in tables for name in every for number in table.numbers(name)}
    patterns = [*specs, *(pattern for pattern in meshes if pattern != _OTHERS)]
    idle = [pattern for pattern in patterns if pattern not in used and pattern not in matched]
    if idle:
        hints = "\n".join(f"  {pattern!r}{suggestion(pattern, known)}" for pattern in idle)
        raise ShardingError(f"no parameter or buffer matches\n{hints}")
    for table in tables:
        for at, pattern in enumerate(table.patterns):
            first = at if pattern in used else next(table.numbers(pattern), at)
            if first < at:
                wider = table.patterns[first]
                raise ShardingError(
                    f"the pattern {pattern!r} never applies: {wider!r} stands before it and matches all that it does; "
                    f"the first that matches applies, so put {pattern!r} before {wider!r}"
                )
    if rules is not None:
        _check_rules(rules, {name for each in found for name in _names(each.logical)})
    given_sizes(sizes, None, (), sorted(needed), "any spec")
    return found


def _check_rules(rules: Rules, names: set[str]) -> None:
    """Refuses a rule about no dim whose name is nearly that of one without a rule: `('...', None)` would hide it."""
    without = sorted(names - {*rules.names, "_", _WHOLE})
    for rule in rules.rules:
        near = suggestion(rule.name, without)
        if rule.axes and rule.name not in names and near.startswith("; did you mean"):
            raise ShardingError(
                f"the rule {rule} is about no dim of a parameter{near}\n{', '.join(without)} "
                f"{'stays' if len(without) == 1 else 'stay'} whole by the last rule, ('...', None); where that is "
                f"meant, write {without[0]}=None"
            )


def _said(
    names: Sequence[str], specs: Mapping[str, str], patterns: NamePatterns, annotated: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """For each name of a tensor that somebody speaks of: the spec, and which pattern it is of.

    `*` is about all others: of a tied tensor it speaks where nothing else does under any of its names.
    """
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        pattern = patterns.first(name)
        if pattern is not None:
            found[name] = specs[pattern], pattern
        elif name in annotated:
            found[name] = annotated[name], "annotation"
    certain = {name: each for name, each in found.items() if each[1] != _OTHERS}
    return certain or found


def _names_of_nothing(module: torch.nn.Module) -> Iterator[str]:
    """The names under which modules have registered None in a parameter's or a buffer's place."""
    for path, each in module.named_modules():
        for name, tensor in (*each._parameters.items(), *each._buffers.items()):
            if tensor is None:
                yield f"{path}.{name}" if path else name


def _names(spec: str) -> set[str]:
    return {factor.name for dim in read(spec).spec.dims for factor in dim.factors if factor.name is not None}


def _sharding(
    module: torch.nn.Module,
    name: str,
    tensor: torch.Tensor,
    said: tuple[str, str],
    mesh: Mesh,
    rules: Rules | None,
    sizes: dict[str, int],
) -> Sharding:
    """The sharding by what is `said` of a tensor: its spec, and which pattern it is of."""
    shape, (spec, pattern) = tuple(tensor.shape), said
    try:
        text = spec if rules is None else rules.spec(spec, mesh, shape, sizes=sizes)
        sharding = sharding_in_torch(mesh, text, shape, tuple(sorted(sizes.items())))
        if sharding.pending:
            raise ShardingError(f"a parameter has nothing pending; found '{sharding}'")
    except AxesError as error:
        if len(error.args) != 1:
            raise
        wide = ""
        if any(mark in pattern for mark in "*?["):
            owner = type(_holder(module, name)[0]).__name__
            wide = f"\n{name} is of {owner}, and '{pattern}' is about it; if that is too wide, put '{name}' before it"
        raise type(error)(f"{name} {list(shape)}, '{spec}': {error}{wide}") from None
    return sharding


def _made(entry: _Placed) -> torch.Tensor:
    """The DTensor of an entry: its shards' values, or memory for them."""
    tensor, sharding = entry.tensor, entry.sharding
    shape, device_type = tuple(tensor.shape), sharding.mesh.binding.device_type
    if tensor.is_meta:
        local_shape = entry.local_shape if sharding.mesh.coordinate is not None else (0,)
        local = torch.empty(local_shape, dtype=tensor.dtype, device=device_type)
    else:
        local = take_shard(tensor.detach(), sharding).to(device_type)
    made = dtensor(local, sharding, shape)
    if not isinstance(tensor, torch.nn.Parameter):
        return made
    parameter = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return resolving(parameter)  # type: ignore[arg-type]


def _holder(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, own = name.rpartition(".")
    return module.get_submodule(path), own


def _table(entries: Sequence[_Placed], meshes: Mapping[str, Mesh], rules: Rules | None) -> str:
    """Names, specs, shapes and bytes on this rank, and what the rules passed over."""
    on = ", ".join(map(repr, dict.fromkeys(meshes.values())))
    heads = ("parameter", "spec", f"on {on}", "local shape", "bytes")
    rows = [heads]
    for entry in entries:
        name = " = ".join(entry.names)
        shape = "x".join(map(str, entry.local_shape)) or "()"
        rows.append((name, entry.logical, entry.sharding.spec, shape, f"{entry.local_bytes:,}"))
    rows.append(("total", "", "", "", f"{sum(entry.local_bytes for entry in entries):,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([*map(str.ljust, row[:-1], widths[:-1]), row[-1].rjust(widths[-1])]).rstrip() for row in rows]
    if rules is not None:
        logical = {name for entry in entries for name in _names(entry.logical)}
        idle = [str(rule) for rule in rules.rules if rule.name not in logical and rule.name != _WHOLE]
        if idle:
            lines.append(f"rules that no parameter uses: {', '.join(idle)}")
    return "\n".join(lines)
