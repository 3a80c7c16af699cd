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
from collections.abc import Iterable, Iterator, Mapping, Sequence

from axes.algebra.equations import Namespace, row_major
from axes.algebra.errors import MeshError, SizeError
from axes.algebra.layout import Layout
from axes.algebra.universe import Universe

Step = tuple[list[str], list[str]]
"""An equation: known names whose product is that of new names. No known ones: an axis of size one is inserted."""

LISTED = 64
"""Of more ranks than this that aren't evenly spaced, the first few stand for all."""


def call_of(universe: Universe, axis_names: Sequence[str], namespace: Namespace, ranks_per_node: int | None) -> str:
    """The shortest call that makes the mesh of these parts; where there is none, its axes alone in angle brackets.

    There is none where the namespace lacks the digits of some ranks, as that of an adopted slice does, where
    a name is a part of an axis whose other parts have no name, and where too many ranks would be listed.
    """
    options = [] if universe.ranks == range(universe.size) else [f"ranks={listed(universe.ranks)}"]
    if ranks_per_node is not None:
        options.append(f"ranks_per_node={ranks_per_node}")
    written = [
        _written(axis_names, namespace, axes, steps, options) for axes, steps in derivations(universe.size, namespace)
    ]
    if not written:
        axes = " ".join(_sized(namespace, axis_names))
        return f"<Mesh {axes!r} of ranks {listed(universe.ranks)}>"
    return min(written, key=len)


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


def derivations(positions: int, namespace: Namespace) -> Iterator[tuple[list[str], list[Step]]]:
    """The ways to derive a namespace: names whose layouts are the digits of all positions, and how the others follow.

    >>> from axes.algebra.mesh import Mesh
    >>> list(derivations(8, Mesh("dp=2 tp=4", "all = dp tp", "tp = kv=2 rep=2").namespace))
    [(['dp', 'tp'], [(['dp', 'tp'], ['all']), (['tp'], ['kv', 'rep'])])]
    """
    layouts = list(namespace.values())
    for count in range(1, len(layouts) + 1):
        sizes = [layout.size for layout in layouts[:count]]
        if math.prod(sizes) == positions and layouts[:count] == row_major(sizes):
            steps = _steps(namespace, count)
            if steps is not None:
                yield list(namespace)[:count], steps


def _steps(namespace: Namespace, count: int) -> list[Step] | None:
    """How all names follow from the first `count`, in their order; None where one of them doesn't."""
    further = list(namespace)[count:]
    known = dict(list(namespace.items())[:count])
    steps: list[Step] = []
    while further:
        found = _equation(namespace, further, known)
        if found is None and namespace[further[0]].size == 1:
            found = [], further[:1]  # an axis of size one that nothing else is equal to can only be inserted
        if found is None:
            return None
        steps.append(found)
        known.update((name, namespace[name]) for name in found[1])
        further = further[len(found[1]) :]
    return steps


def _written(
    axis_names: Sequence[str], namespace: Namespace, axes: Sequence[str], steps: Sequence[Step], options: Sequence[str]
) -> str:
    """A derivation as a call."""
    axes, text = [*axes], "Mesh({})"
    arguments = [repr(" ".join(_sized(namespace, axes)))]
    for factors, new in steps:
        if factors:
            arguments.append(repr(equation_text(factors, {name: namespace[name].size for name in new})))
            continue
        text = text.format(", ".join([*arguments, *options])) + f".rearrange('... -> ... {new[0]}=1').define({{}})"
        arguments, options = [], []
        axes += new
    text = text.format(", ".join([*arguments, *options])).replace(".define()", "")
    return text if axes == [*axis_names] else f"{text}[{', '.join(map(repr, axis_names))}]"


def equation_text(factors: Sequence[str], new: Mapping[str, int]) -> str:
    """The equation by which new names, with their sizes, are a product of others, or split it.

    >>> equation_text(["dp", "cp"], {"fsdp": 8}), equation_text(["dp", "cp"], {"sp": 2, "ep": 4})
    ('fsdp = dp cp', '(dp cp) = sp=2 ep=4')
    """
    if len(new) == 1:
        return f"{next(iter(new))} = {' '.join(factors)}"
    whole = factors[0] if len(factors) == 1 else f"({' '.join(factors)})"
    return f"{whole} = {' '.join(f'{name}={size}' for name, size in new.items())}"


def _equation(namespace: Namespace, further: Sequence[str], known: Mapping[str, Layout]) -> Step | None:
    """The equation that gives the first, or the first few, of the further names."""
    for count in range(1, len(further) + 1):
        new = list(further[:count])
        try:
            factors = _factors(Layout.product(*(namespace[name] for name in new)), known)
        except MeshError:  # they share digits, so that no axis splits into them
            return None
        if factors is not None:
            return factors, new
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


def _sized(namespace: Namespace, names: Iterable[str]) -> Iterator[str]:
    return (f"{name}={namespace[name].size}" for name in names)
