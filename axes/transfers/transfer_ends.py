"""What a transfer is told: how tensors lie, and on which meshes; by name or by patterns of names.

>>> by_name({"layers.0.*": Mesh("dp=2"), "*": Mesh("pp=2 tp=2")})("layers.1.w").axis_names
('pp', 'tp')
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from axes.algebra.errors import AxesError, MeshError, ShardingError, shortened, shown
from axes.algebra.grammar import parse_spec
from axes.algebra.layout import Layout, Universe, digits
from axes.algebra.mesh import Mesh, required_mesh
from axes.algebra.sharding import Names, Sharding, Slot, Slots
from axes.algebra.sizes import given_sizes
from axes.algebra.specs import parsed_sharding
from axes.transfers.layout_rules import LayoutRules
from axes.transfers.name_patterns import NamePatterns

End = str | Sharding
Meshes = Mesh | Mapping[str, Mesh]


def shardings(
    side: str,
    specs: Mapping[str, End],
    meshes: Meshes | None,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
) -> tuple[dict[str, Sharding], Mesh | None]:
    """The shardings of tensors of these shapes by name, each on a mesh of its own ranks; and a mesh of the job."""
    found, home, mesh_of, given = {}, None, by_name(meshes), tuple(sorted(sizes.items()))
    for name, shape in sorted(shapes.items()):
        with of_tensor(name, shape):
            end = specs[name]
            own = end.mesh if isinstance(end, Sharding) else mesh_of(name)
            if own is None and isinstance(meshes, Mapping):
                raise MeshError(f"no pattern of {side}_mesh matches: {', '.join(map(shortened, meshes))}")
            mesh = required_mesh(own, "axes.transfer")
            found[name] = _sized_end(end, mesh, shape, given, getattr(end, "names", ()), mesh._view)
            home = home or (mesh if mesh.binding is not None else None)
    return found, home


@lru_cache(4096)
def _sized_end(
    end: End, mesh: Mesh, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...], *_: Names | int | None
) -> Sharding:
    """An end of a tensor, kept for its names and the view of its mesh as well: equal ones may differ in these."""
    if isinstance(end, str):
        names = names_in_spec(end)
        sizes = tuple([(name, size) for name, size in sizes if name in names])
    return read_end(end, mesh, sizes, len(shape)).at(shape)


def read_end(end: End, mesh: Mesh, sizes: tuple[tuple[str, int], ...] = (), ndim: int | None = None) -> Sharding:
    """A spec on a mesh, or a sharding, on a mesh that has no more ranks than the tensor.

    Raises `ShardingError` for what is neither, and for what is pending.
    """
    if not isinstance(end, str | Sharding):
        raise ShardingError(f"a tensor lies by a spec, like 'f@tp d', or a Sharding; found {shown(end)}")
    found = end if isinstance(end, Sharding) else parsed_sharding(mesh, end, sizes, ndim)
    if any(op != "same" for op, _ in found.pending):
        raise ShardingError(f"'{found}' has something pending; resolve it first, with axes.reshard")
    return _on_own_ranks(replace(found, pending=()))


def check_used(sizes: dict[str, int], ends: Iterable[End], rules: LayoutRules | None) -> None:
    """`SizeError` for a size of a name that neither a spec nor the rules have."""
    used = [names_in_spec(end) for end in dict.fromkeys(ends) if isinstance(end, str)]
    given_sizes(sizes, None, (), sorted(frozenset().union(*used, () if rules is None else rules._names)), "the specs")


@contextlib.contextmanager
def of_tensor(name: str, shape: tuple[int, ...] | None = None) -> Iterator[None]:
    """Errors in this block say of which tensor they are."""
    try:
        yield
    except AxesError as error:
        whole = "" if shape is None else f", {shown(list(shape))}"
        raise type(error)(f"{error}\n  of the tensor {shortened(name)}{whole}") from None


def _on_own_ranks(sharding: Sharding) -> Sharding:
    """The same on a mesh that has no more ranks than the tensor: of a sub-mesh, those that it is seen from.

    >>> mesh = Mesh("pp=2 tp=2").at(3)
    >>> _on_own_ranks(mesh["tp"].sharding("f@tp")).universe
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

    def moved(layout: Layout) -> Layout:
        """The layout in positions along the mesh's own axes."""
        return Layout.of([(size, mesh.extent.coordinate(stride)) for size, stride in digits(mesh.extent, layout)[1]])

    inside = [name for name, layout in mesh.namespace.items() if layout.size > 1 and mesh.extent.contains(layout)]
    namespace = {name: moved(mesh.namespace[name]) for name in dict.fromkeys((*mesh.axis_names, *inside))}
    # Its DTensors would be on another device mesh than the user's own, so that it is algebra alone.
    universe = Universe.of(mesh.universe.group(mesh.extent, mesh.rank))
    small = mesh._with(universe=universe, namespace=namespace, _view=None, binding=None)
    dims = [Slots([Slot(tuple(map(moved, slot.layouts)), slot.size) for slot in dim]) for dim in sharding.dims]
    return Sharding(small, tuple(dims), names=sharding.names)


def by_name(given: Any) -> Callable[[str], Any]:
    """What is said of each name: one value for all, or that of the name itself, or of the first pattern that matches.

    >>> [by_name({"*.b": 1, "*": 2, "a.b": 3})(name) for name in ("a.b", "c.b", "c")]
    [3, 1, 2]
    """
    if not isinstance(given, Mapping):
        return lambda name: given
    patterns = NamePatterns(given)
    return lambda name: given[name] if name in given else given.get(patterns.first(name))


def names_in_spec(spec: str) -> frozenset[str]:
    """The names of dims in a spec."""
    return frozenset(factor.name for dim in parse_spec(spec).dims for factor in dim.factors if factor.name)
