"""Sharding a module's parameters: by patterns, by annotations, whatever the model is.

    axes.shard_module(model, {"*.wq.weight": "(heads head_dim) embed", "*": "..."}, rules=rules, heads=32)

The module stays the one that it was: its parameters are replaced by DTensors, in place, one after the other.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from axes import AxesError, Mesh, Rules, Sharding, ShardingError, all_gather
from axes.extension import dtensor, read
from axes.nn.annotate import annotated, checked_specs
from axes.nn.deferred import made_by_initializers
from axes.nn.module_tensors import by_tensor, fill, tensors_of
from axes.nn.options import checked_sizes

M = TypeVar("M", bound=torch.nn.Module)

_OTHERS = "*"
"""The pattern that matches every name."""

_WHOLE = "..."
"""The spec of a buffer that nobody mentions: every rank has all of it."""


@dataclass(frozen=True)
class _Placed:
    """A tensor of the module: its names (several where it is tied), its spec, and its sharding on the mesh."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    logical: str
    sharding: Sharding


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
    """Shard the parameters and buffers of a module, in place.

    Parameters with values: every rank has the whole module, and keeps a copy of its shards. Parameters on the device
    `meta`: each rank makes its shards by the modules' `reset_parameters()` or the root's `init_weights()`; their
    random values follow from torch's seed on the first rank, the parameter's name and the place in it, so they are
    the same on every mesh.

    Tied parameters stay tied. A buffer that no pattern matches is replicated. Like torch's `parallelize_module`,
    with specs in the place of styles.

    Args:
        module: The module.
        specs: Specs by patterns of whole names, as of `fnmatch`; the first that matches applies, before annotations
            (`axes.annotate`). `"..."` keeps a parameter whole.
        mesh: The mesh, by default the ambient one; or meshes by patterns of names, the first that matches applies:
            `{"*.experts.*": mesh["ep"], "*": mesh["tp"]}`.
        rules: Rules by which specs are in logical names; by default those of `axes.use_rules`.
        dry_run: Change nothing, and print a table of parameters, specs, shapes and bytes on this rank.
        sizes: Sizes of names in groups, for names that collide with a parameter.
        **keywords: Sizes of names in groups.

    Returns:
        The module.

    Raises:
        ShardingError: Parameters without a spec, patterns that never apply, tied names with two specs, parameters
            that are sharded already or that no initializer makes. The last one alone is raised after changes.
        SizeError: A strict rule doesn't divide.
        MeshError: There is no mesh, or it lacks an axis.

    Examples:
        >>> import axes
        >>> with axes.simulate(8), axes.init_mesh("dp=2 tp=4", device_type="cpu"):
        ...     linear = axes.shard_module(torch.nn.Linear(8, 16, bias=False), {"weight": "f@tp d"})
        ...     linear.weight.to_local().shape
        torch.Size([4, 8])
    """
    if not isinstance(module, torch.nn.Module):
        raise ShardingError(f"axes.shard_module takes a module; found {type(module).__name__}")
    meshes = _meshes(mesh)
    rules = Rules.ambient("axes.shard_module", rules)
    given = {**keywords, **(sizes or {})}
    specs = {} if specs is None else checked_specs("specs map patterns of names to specs", specs, "{'*.weight': 'f d'}")
    entries = _entries(module, specs, meshes, rules, given)
    if dry_run:
        print(_table(entries, meshes))
        return module
    for each in meshes.values():
        each._bound("axes.shard_module")
    deferred: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for entry in entries:
        made = _made(entry)
        for path, _, own in (name.rpartition(".") for name in entry.names):
            owner = module.get_submodule(path)
            places: dict[str, Any] = owner._parameters if own in owner._parameters else owner._buffers
            places[own] = made
        (deferred if entry.tensor.is_meta else others)[entry.names[0]] = made
    if deferred:
        seeds = _seeds(meshes.values())
        by_name = {entry.names[0]: seeds[entry.sharding.mesh] for entry in entries}
        made_by_initializers(module, deferred, others, by_name)
    return module


def _meshes(mesh: Mesh | Mapping[str, Mesh] | None) -> dict[str, Mesh]:
    """The mesh of each pattern of names; one mesh is that of all names."""
    meshes = mesh if isinstance(mesh, Mapping) else {_OTHERS: mesh}
    return {pattern: Mesh.ambient("axes.shard_module", each) for pattern, each in meshes.items()}


def _seeds(meshes: Iterable[Mesh]) -> dict[Mesh, int]:
    """For each mesh a seed, from the default generator of its first rank. A rank draws one number for all meshes."""
    # By the generator of the CPU, whatever torch.set_default_device says.
    seed = torch.randint(2**62, (1,), dtype=torch.int64, device="cpu")
    found = dict.fromkeys(meshes, int(seed))
    for mesh in found:
        if mesh.size > 1 and mesh.coordinate is not None:
            found[mesh] = int(all_gather(seed.to(mesh.device_mesh.device_type), mesh.axis_names, mesh=mesh)[0])
    return found


def _entries(
    module: torch.nn.Module,
    specs: Mapping[str, str],
    meshes: Mapping[str, Mesh],
    rules: Rules | None,
    sizes: dict[str, int],
) -> list[_Placed]:
    """Every tensor of the module with what is said of it."""
    annotations, named = annotated(module), tensors_of(module)
    # A pattern may be of a parameter that the module has registered as None.
    places = ((path, each._parameters | each._buffers) for path, each in module.named_modules())
    nothing = [f"{path}.{name}".lstrip(".") for path, own in places for name, x in own.items() if x is None]
    every = [*(name for name, _ in named), *nothing]
    spec_of, mesh_of = _firsts(specs, every), _firsts(meshes, every)
    parameters = {id(p) for p in module.parameters()}
    found, uncovered, without_mesh = [], "", ""
    for names, tensor in by_tensor(named):
        if isinstance(tensor, DTensor):
            raise ShardingError(
                f"{names[0]} is sharded already; shard_module takes a module of plain tensors. Say all specs in one "
                "call, or make the module anew"
            )
        said = {name: (annotations[name], "annotation") for name in names if name in annotations}
        said |= {name: (specs[spec_of[name]], spec_of[name]) for name in names if name in spec_of}
        # `*` is about all others: of a tied tensor it speaks where nothing else does under any of its names.
        said = {name: each for name, each in said.items() if each[1] != _OTHERS} or said
        if not said and id(tensor) not in parameters:
            said = {names[0]: (_WHOLE, "")}
        homes = {name: meshes[mesh_of[name]] for name in names if name in mesh_of}
        described = f"  {' = '.join(names)}  {list(tensor.shape)}\n"
        uncovered += "" if said else described
        without_mesh += "" if homes else described
        if said and homes:
            found.append(_placed(names, tensor, said, homes, rules, sizes))
    if without_mesh or uncovered:
        kind, others = ("pattern of mesh=", "mesh") if without_mesh else ("pattern or annotation", "'...'")
        raise ShardingError(
            f"no {kind} is about\n{without_mesh or uncovered}name them, or say of all others "
            + ("where they are" if without_mesh else "that they are whole on every rank")
            + f": {{..., '*': {others}}}"
        )
    for patterns, firsts in ((specs, spec_of), (meshes, mesh_of)):
        idle = [pattern for pattern in patterns if pattern != _OTHERS and pattern not in firsts.values()]
        if idle:
            raise ShardingError(
                f"these patterns never apply: {', '.join(map(repr, idle))}\nthe first that matches a name applies, so "
                "put a pattern before the wider ones, and leave out one that matches no parameter or buffer; names are "
                f"{', '.join(name for name, _ in named[:8])}{' ...' if len(named) > 8 else ''}"
            )
    names_of_dims = sorted({name for each in found for name in _names(each.logical)})
    for rule in rules.rules if rules is not None and rules.strict else ():
        if rule.axes and rule.name not in (*names_of_dims, _WHOLE):
            raise ShardingError(
                f"the rule {rule} is strict, and about no dim of a parameter; found {', '.join(names_of_dims)}. Rules "
                "for activations are a table of their own"
            )
    checked_sizes(sizes, names_of_dims, "isn't in any spec")
    return found


def _firsts(patterns: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """The first pattern that matches, for each name that has one."""
    listed = list(patterns)
    table = re.compile("|".join(f"({fnmatch.translate(each)})" for each in listed) or "(?!)")
    return {name: listed[found.lastindex - 1] for name in names if (found := table.match(name)) and found.lastindex}


def _names(spec: str) -> set[str]:
    return {factor.name for dim in read(spec).spec.dims for factor in dim.factors if factor.name is not None}


def _placed(
    names: Sequence[str],
    tensor: torch.Tensor,
    said: Mapping[str, tuple[str, str]],
    homes: Mapping[str, Mesh],
    rules: Rules | None,
    sizes: Mapping[str, int],
) -> _Placed:
    """A tensor by what is `said` of it under its names: the spec, and which pattern it is of."""
    tied = f"one tensor under {len(names)} names, tied, has two"
    if len({*homes.values()}) > 1:
        each = "\n".join(f"  {name}  {mesh!r}" for name, mesh in homes.items())
        raise ShardingError(f"{tied} meshes:\n{each}\ngive it one")
    mesh, shape, found = next(iter(homes.values())), tuple(tensor.shape), []
    for name, (spec, pattern) in said.items():
        try:
            mine = {each: size for each, size in sizes.items() if each in _names(spec)}
            text = spec if rules is None else rules.spec(spec, mesh, shape, sizes=mine)
            sharding = mesh.sharding(text, shape, sizes=mine)
            if sharding.pending:
                raise ShardingError(f"a parameter has nothing pending; found '{sharding}'")
        except AxesError as error:
            if len(error.args) != 1:
                raise
            raise type(error)(f"{name} {list(shape)}, '{spec}' ({pattern}): {error}") from None
        found.append(_Placed(tuple(names), tensor, spec, sharding))
    if not all(each.sharding.is_equivalent(found[0].sharding, shape) for each in found):
        each = "\n".join(f"  {name}  {spec}    ({pattern})" for name, (spec, pattern) in said.items())
        raise ShardingError(f"{tied} specs:\n{each}\ngive it one")
    return found[0]


def _made(entry: _Placed) -> torch.Tensor:
    """The DTensor of an entry: its shards' values, or memory for them."""
    tensor, sharding = entry.tensor, entry.sharding
    shape, is_member = tuple(tensor.shape), sharding.mesh.coordinate is not None
    device_type, local_shape = sharding.mesh.device_mesh.device_type, sharding.local_shape(shape) if is_member else (0,)
    requires_grad = tensor.requires_grad if isinstance(tensor, torch.nn.Parameter) else None
    made = dtensor(torch.empty(local_shape, dtype=tensor.dtype, device=device_type), sharding, shape, requires_grad)
    if not tensor.is_meta:
        fill(made, tensor.detach())
    if requires_grad is not None:
        made.__dict__.update(tensor.__dict__)
    return made


def _table(entries: Sequence[_Placed], meshes: Mapping[str, Mesh]) -> str:
    """Names, specs, shapes and bytes on this rank."""
    on = ", ".join(map(repr, dict.fromkeys(meshes.values())))
    rows, total = [("parameter", "spec", f"on {on}", "local shape", "bytes")], 0
    for entry in entries:
        shape = entry.sharding.local_shape(tuple(entry.tensor.shape))
        size = math.prod(shape) * entry.tensor.itemsize
        total += size
        texts = " = ".join(entry.names), entry.logical, entry.sharding.spec, "x".join(map(str, shape)) or "()"
        rows.append((*texts, f"{size:,}"))
    rows.append(("total", "", "", "", f"{total:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([*map(str.ljust, row[:-1], widths), row[-1].rjust(widths[-1])]) for row in rows)
