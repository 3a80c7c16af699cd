"""A mesh as the call that makes it, which is what `repr` prints.

The first names of the namespace that are the digits of all ranks are the declaration. Each name after
them is an equation over those before it: a product of them, or with its neighbours a way to split one.
What isn't all of the axes is a sub-mesh.

>>> from axes.algebra.mesh import Mesh
>>> Mesh("dp=2 cp=4 tp=2", "fsdp = dp cp", "(cp tp) = sp ep", ep=4)["ep", "dp"]
Mesh('dp=2 cp=4 tp=2', 'fsdp = dp cp', '(cp tp) = sp=2 ep=4')['ep', 'dp']
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from axes.algebra.equations import row_major
from axes.algebra.errors import MeshError, SizeError
from axes.algebra.layout import Layout

if TYPE_CHECKING:
    from axes.algebra.mesh import Mesh

LISTED = 64
"""Of more ranks than this that aren't evenly spaced, the first few stand for all."""


def call_of(mesh: Mesh) -> str:
    """The shortest call that makes the mesh; in angle brackets, with its axes alone, where there is none.

    There is none where the namespace lacks the digits of some ranks, as that of an adopted slice does, where
    a name is a part of an axis whose other parts have no name, and where too many ranks would be listed.
    """
    calls = [call for count in _declarations(mesh) for call in _calls(mesh, count)]
    if not calls:
        axes = " ".join(_sized(mesh.shape))
        return f"<Mesh {axes!r} of ranks {listed(mesh.universe.ranks)}>"
    return min(calls, key=len)


def listed(ranks: range | tuple[int, ...], most: int = LISTED) -> str:
    """Ranks as Python writes them, or the first few.

    >>> listed((3, 1)), listed(tuple(range(9, 0, -1)), most=8)
    ('[3, 1]', '[9, 8, 7, 6, ... 9 in all]')
    """
    if isinstance(ranks, range):
        return str(ranks)
    if len(ranks) <= most:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:4]))}, ... {len(ranks)} in all]"


def _declarations(mesh: Mesh) -> Iterator[int]:
    """How many of the first names could be a declaration: their layouts are the digits of all positions."""
    layouts = list(mesh.namespace.values())
    for count in range(1, len(layouts) + 1):
        sizes = [layout.size for layout in layouts[:count]]
        if math.prod(sizes) == mesh.universe.size and layouts[:count] == row_major(sizes):
            yield count


def _calls(mesh: Mesh, count: int) -> Iterator[str]:
    """The call with `count` names in the declaration, if there is one."""
    names = mesh.names
    axes, further = list(names)[:count], list(names)[count:]
    arguments = [repr(" ".join(_sized({name: names[name] for name in axes})))]
    options = []
    if mesh.universe.ranks != range(mesh.universe.size):
        options.append(f"ranks={listed(mesh.universe.ranks)}")
    if mesh.ranks_per_node is not None:
        options.append(f"ranks_per_node={mesh.ranks_per_node}")
    text = "Mesh({})"
    known = {name: mesh.namespace[name] for name in axes}
    while further:
        found = _equation(mesh, further, known)
        if found is not None:
            equation, new = found
            arguments.append(repr(equation))
        elif names[further[0]] == 1:
            new = further[:1]  # an axis of size one that nothing else is equal to can only be inserted
            text = text.format(", ".join([*arguments, *options])) + f".rearrange('... -> ... {new[0]}=1').define({{}})"
            arguments, options = [], []
            axes += new
        else:
            return
        known.update((name, mesh.namespace[name]) for name in new)
        further = further[len(new) :]
    text = text.format(", ".join([*arguments, *options])).replace(".define()", "")
    yield text if tuple(axes) == mesh.axis_names else f"{text}[{', '.join(map(repr, mesh.axis_names))}]"


def _equation(mesh: Mesh, further: Sequence[str], known: Mapping[str, Layout]) -> tuple[str, list[str]] | None:
    """An equation that gives the first, or the first few, of the further names, and these names."""
    for count in range(1, len(further) + 1):
        new = list(further[:count])
        try:
            factors = _factors(Layout.product(*(mesh.namespace[name] for name in new)), known)
        except MeshError:  # they share digits, so that no axis splits into them
            return None
        if factors is not None:
            if count == 1:
                return f"{new[0]} = {' '.join(factors)}", new
            whole = factors[0] if len(factors) == 1 else f"({' '.join(factors)})"
            return f"{whole} = {' '.join(_sized({name: mesh.names[name] for name in new}))}", new
    return None


def _factors(layout: Layout, known: Mapping[str, Layout]) -> list[str] | None:
    """Names whose product, in this order, is the layout."""
    for name, other in known.items():
        if other == layout:
            return [name]
    for name, other in known.items():
        if 1 < other.size < layout.size and layout.size % other.size == 0:
            try:
                first, rest = layout.split((other.size, layout.size // other.size))
            except SizeError:
                continue
            more = _factors(rest, known) if first == other else None
            if more is not None:
                return [name, *more]
    return None


def _sized(sizes: Mapping[str, int]) -> Iterator[str]:
    return (f"{name}={size}" for name, size in sizes.items())
