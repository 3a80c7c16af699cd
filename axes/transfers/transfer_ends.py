"""What a transfer is told: how tensors lie, and on which meshes; by name or by patterns of names.

>>> mesh_of = meshes_by_name({"layers.0.*": Mesh("dp=2"), "*": Mesh("pp=2 tp=2")}, "source")
>>> mesh_of("layers.1.w").axis_names
('pp', 'tp')
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from axes.algebra.errors import AxesError, MeshError, ShardingError, shortened, shown, suggestion
from axes.algebra.grammar import parse_spec
from axes.algebra.layout import Layout, Universe, digits
from axes.algebra.mesh import Mesh, checked_mesh, required_mesh
from axes.algebra.sharding import Names, Sharding, Slot, Slots
from axes.algebra.sizes import given_sizes
from axes.algebra.specs import parsed_sharding
from axes.transfers.layout_rules import LayoutRules
from axes.transfers.name_patterns import NamePatterns

End = str | Sharding
Meshes = Mesh | Mapping[str, Mesh]


class EndsOfSpecs:
    """Shardings of specs, each found once."""

    def __init__(self, sizes: dict[str, int], rules: LayoutRules | None):
        self.sizes, self.used = sizes, set[str]() if rules is None else set(rules._names)
        self.home: Mesh | None = None
        self.found = lru_cache(4096)(self._found)

    def shardings(
        self, side: str, specs: Mapping[str, End], meshes: Meshes | None, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Sharding]:
        """The shardings of tensors of these shapes, by name; the mesh of each is of its own ranks alone."""
        found, mesh_of = {}, meshes_by_name(meshes, side)
        for name, shape in sorted(shapes.items()):
            with of_tensor(name, shape):
                end, mesh = specs[name], mesh_of(name)
                if not isinstance(end, str | Sharding):
                    raise ShardingError(f"a {side} is a spec, like 'f@tp d', or a Sharding; found {shown(end)}")
                if isinstance(end, Sharding):
                    found[name] = self.found(end, None, shape, end.names, end.mesh._view)
                else:
                    mesh = required_mesh(mesh, "axes.transfer")
                    found[name] = self.found(end, mesh, shape, (), mesh._view)
        return found

    def _found(self, end: End, mesh: Mesh | None, shape: tuple[int, ...], *_: Names | int | None) -> Sharding:
        """The sharding, kept for the names of the end and the view of its mesh: equal ones may differ in these."""
        if isinstance(end, str):
            assert mesh is not None, "a spec is read on a mesh"
            names = names_in_spec(end)
            self.used.update(names)
            sizes = tuple(sorted((name, size) for name, size in self.sizes.items() if name in names))
            end = parsed_sharding(mesh, end, sizes, len(shape))
        if any(op != "same" for op, _ in end.pending):
            raise ShardingError(f"'{end}' has something pending; resolve it first, with axes.reshard")
        self.home = self.home or (end.mesh if end.mesh.binding is not None else None)
        return on_own_ranks(replace(end, pending=())).at(shape)

    def check_used(self) -> None:
        """`SizeError` for a size of a name that no spec has."""
        given_sizes(self.sizes, None, (), sorted(self.used), "the specs")


@contextlib.contextmanager
def of_tensor(name: str, shape: tuple[int, ...] | None = None) -> Iterator[None]:
    """Errors in this block say of which tensor they are."""
    try:
        yield
    except AxesError as error:
        whole = "" if shape is None else f", {shown(list(shape))}"
        raise type(error)(f"{error}\n  of the tensor {shortened(name)}{whole}") from None


def on_own_ranks(sharding: Sharding) -> Sharding:
    """The same on a mesh that has no more ranks than the tensor: of a sub-mesh, those that it is seen from.

    >>> mesh = Mesh("pp=2 tp=2").at(3)
    >>> on_own_ranks(mesh["tp"].sharding("f@tp")).universe
    Universe(ranks=range(2, 4))
    """
    mesh = sharding.mesh
    if mesh.size == mesh.universe.size:
        return sharding if mesh._view is None else replace(sharding, mesh=mesh._with(_view=None))
    if mesh.binding is not None and mesh._view is None:
        names = ", ".join(f'"{name}"' for name in mesh.axis_names)
        raise MeshError(
            f"mesh[{names}] is another one on each rank; a transfer is the same on all. "
            f"Say which one it is, by one of its ranks: mesh.at(rank)[{names}]"
        )
    ranks = mesh.universe.group(mesh.extent, mesh.rank)

    def moved(layout: Layout) -> Layout:
        extent, cut = digits(mesh.extent, layout)
        strides, stride = {}, 1
        for size, old in reversed(extent):
            strides[old] = stride
            stride *= size
        return Layout.of([(size, strides[old]) for size, old in cut])

    inside = [name for name, layout in mesh.namespace.items() if layout.size > 1 and mesh.extent.contains(layout)]
    namespace = {name: moved(mesh.namespace[name]) for name in dict.fromkeys((*mesh.axis_names, *inside))}
    # Its DTensors would be on another device mesh than the user's own, so that it is algebra alone.
    small = mesh._with(universe=Universe.of(ranks), namespace=namespace, _view=None, binding=None)

    def on_small(slot: Slot) -> Slot:
        return Slot(tuple(map(moved, slot.layouts)), slot.size)

    return Sharding(small, tuple([Slots(map(on_small, dim)) for dim in sharding.dims]), names=sharding.names)


def meshes_by_name(given: Meshes | None, side: str) -> Callable[[str], Mesh | None]:
    """The mesh of each tensor, from one for all or from patterns of names; `MeshError` where none matches."""
    found_of = by_name(given)

    def mesh_of(name: str) -> Mesh | None:
        found = found_of(name)
        if not isinstance(given, Mapping):
            return given
        if found is None:
            raise MeshError(f"no pattern of {side}_mesh matches {shortened(name)}: {', '.join(map(shortened, given))}")
        return checked_mesh(found)

    return mesh_of


def by_name(given: Any) -> Callable[[str], Any]:
    """What is said of each name: one value for all, or that of the name itself, or of the first pattern that matches.

    >>> [by_name({"*.b": 1, "*": 2, "a.b": 3})(name) for name in ("a.b", "c.b", "c")]
    [3, 1, 2]
    """
    if not isinstance(given, Mapping):
        return lambda name: given
    patterns = NamePatterns(given)

    def value_of(name: str) -> Any:
        pattern = name if name in given else patterns.first(name)
        return None if pattern is None else given[pattern]

    return value_of


def names_in_spec(spec: str) -> frozenset[str]:
    """The names of dims in a spec."""
    return frozenset(factor.name for dim in parse_spec(spec).dims for factor in dim.factors if factor.name)


def check_patterns(what: str, patterns: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    """`ShardingError` for a pattern of dtype= that no target has."""
    table = NamePatterns(patterns)
    used = {number for name in targets for number in table.numbers(name)}
    for number, pattern in enumerate(table.patterns):
        if pattern not in targets and number not in used:
            raise ShardingError(f"{shortened(pattern)} of {what}= matches no target{suggestion(pattern, targets)}")
