"""The mesh that the result of an expression lies on, and what the axes of the text mean there.

An expression may name axes of the ambient mesh that the tensors' own mesh has under other names or as parts
of its axes, but each of them is made of the axes that the tensors are on, and is used once.
"""

from __future__ import annotations

from collections.abc import Sequence

from axes.algebra.errors import MeshError, ShardingError, pointed, suggestion, unknown_axis
from axes.algebra.flow.reading import Reading
from axes.algebra.grammar import Span
from axes.algebra.mesh import Mesh
from axes.algebra.sharding import Sharding


def mesh_of_result(reading: Reading, mesh: Mesh, shardings: Sequence[Sharding | None]) -> Mesh:
    """The mesh that the result lies on, knowing the names of the expression."""
    meshes = list(dict.fromkeys(s.mesh for s in shardings if s is not None))
    for name in reading.axes:
        if name not in mesh.namespace and not any(name in m.namespace for m in meshes):
            shown = pointed(reading.text, *next(span for _, axis, span in reading.uses if axis == name))
            raise MeshError(f"{unknown_axis(name, mesh.namespace, _hint(name, mesh, reading))}\n{shown}")
    if not meshes:
        return mesh
    home = meshes[0]
    other = next((m for m in meshes[1:] if m.universe != home.universe or m.layouts != home.layouts), None)
    if other is not None:
        raise MeshError(
            f"the tensors are on two meshes, {home!r} and {other!r}; {_both(home, other)}\nin  {reading.text}"
        )
    if mesh.universe != home.universe:
        raise MeshError(f"the tensor is on {home!r}, which has other ranks than {mesh!r}\nin  {reading.text}")
    return _knowing(reading, home, mesh)


def _both(home: Mesh, other: Mesh) -> str:
    """What to write where tensors of two meshes meet."""
    if home.universe != other.universe:
        return "they have other ranks: axes.reshard(x, spec, mesh=other) moves a tensor from one to the other"
    one, two = home.layout_of_all, other.layout_of_all
    if one.size != two.size and (one.contains(two) or two.contains(one)):
        return "bring one onto the other's mesh, which has more axes: axes.from_local(axes.to_local(x), spec, mesh=...)"
    names = ", ".join(repr(name) for name in dict.fromkeys((*home.axis_names, *other.axis_names)))
    return f"bring both onto a mesh with the axes of both: axes.from_local(axes.to_local(x), spec, mesh=mesh[{names}])"


def _knowing(reading: Reading, home: Mesh, other: Mesh) -> Mesh:
    """`home` with the names that the expression takes from another mesh."""
    if other is home or (all(name in home.namespace for name in reading.axes) and other == home):
        return home
    namespace = dict(home.namespace)
    for name in reading.axes:
        layout = other.namespace.get(name)
        if layout is not None and namespace.setdefault(name, layout) != layout:
            raise MeshError(
                f"'{name}' is {home.described(name)} of {home!r}, on which the tensor is, and other ranks on "
                f"{other!r}; two meshes that meet give a name one meaning, so rename one\nin  {reading.text}"
            )
    return home if len(namespace) == len(home.namespace) else home._with(namespace=namespace)


def _hint(name: str, mesh: Mesh, reading: Reading) -> str:
    if name in reading.names:
        return f", but a dim of this name; axes: {', '.join(mesh.axis_names)}"
    return suggestion(name, mesh.namespace)


def check_axes(reading: Reading, mesh: Mesh) -> None:
    """Every axis is made of the mesh's axes, and none is used twice, whatever its size."""
    for name in reading.axes:
        layout = mesh.namespace[name]
        if name not in mesh.axis_names and not mesh.layout_of_all.contains(layout):
            raise MeshError(
                f"axis '{name}' ({layout}) isn't made of the axes of {mesh!r}, on which the tensor is; "
                f"axes.from_local or axes.reshard with mesh= brings it onto one that has it\nin  {reading.text}"
            )
    for term in reading.terms:
        _check_once(reading, mesh, term.uses)
    every = [use for term in reading.operands for slot in term.slots for use in slot.uses]
    _check_once(reading, mesh, list({use[:2]: use for use in every}.values()))


def _check_once(reading: Reading, mesh: Mesh, uses: Sequence[tuple[str, str, Span]]) -> None:
    for at, (what, axis, span) in enumerate(uses):
        for before, other, _ in uses[:at]:
            if axis == other or mesh.namespace[axis].overlaps(mesh.namespace[other]):
                both = f"'{axis}' is used twice" if axis == other else f"'{other}' and '{axis}' share ranks"
                places = f"by '{before}' and by '{what}'" if before != what else f"by '{what}'"
                shown = pointed(reading.text, *span)
                raise ShardingError(f"{both}: {places}; an axis splits one dim or is pending\n{shown}")
