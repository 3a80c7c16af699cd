"""Mesh expressions, `"(dp cp) tp -> dp fsdp=(cp tp)"`: from text to layout operations.

The left side is matched with the mesh's axes in order; its groups are splits. The right side is an order of the axes
that there are then, and its groups are flattened. So there are at most four kinds of operations: split, insert (axes of
size one), permute, flatten. They are carried out as they are found, and are what `explain` prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from axes.algebra.errors import ExpressionError, MeshError, pointed, shortened, suggestion
from axes.algebra.explanation import Explanation, Section
from axes.algebra.grammar import Dim, Factor, Item, MeshExpression, has_dots, leaves, parse_mesh
from axes.algebra.layout import Layout
from axes.algebra.sizes import Product, given_sizes, solve

Axes = dict[str, Layout]
Dims = Sequence[Dim]


@dataclass(frozen=True)
class LayoutOperation:
    """One operation on the axes of a mesh: the axes `before` were replaced by the axes `after`."""

    kind: str
    before: Axes
    after: Axes

    def __str__(self) -> str:
        before, after = (
            ", ".join([f"{name} {layout}" for name, layout in axes.items()]) for axes in (self.before, self.after)
        )
        if self.kind == "permute":
            return f"permute  {' '.join(self.after)}"
        return f"{self.kind:<8} {before}  ->  {after}" if before else f"{self.kind:<8} {after}"


@dataclass(frozen=True)
class Rearrangement:
    """What an expression did to the axes of one mesh: how it was read, the operations, and the axes of the result."""

    reading: str
    sizes: Mapping[str, int]
    steps: tuple[LayoutOperation, ...]
    axes: Axes

    @property
    def made(self) -> Axes:
        """Every axis that an operation made."""
        return {name: layout for step in self.steps for name, layout in step.after.items()}

    def explanation(self) -> Explanation:
        """The reading, and what is done step by step."""
        rows = tuple([(str(step),) for step in self.steps]) or (("nothing to do",),)
        facts = {
            "kind": "mesh",
            "read": self.reading,
            "sizes": dict(self.sizes),
            "steps": [{"kind": s.kind, "before": _texts(s.before), "after": _texts(s.after)} for s in self.steps],
        }
        return Explanation(self.reading, (Section("", rows),), facts)


def _texts(axes: Axes) -> dict[str, str]:
    return {name: str(layout) for name, layout in axes.items()}


def rearranged(
    axes: Axes, namespace: Mapping[str, Layout], expression: str, sizes: Mapping[str, int | None]
) -> Rearrangement:
    """Carry a mesh expression out on a mesh with these axes, in order, and these names.

    Raises `ExpressionError` with a caret where the expression isn't about this mesh, `SizeError`
    for sizes that don't follow, `MeshError` where a name already means other ranks.
    """
    tree = parse_mesh(expression)
    left, right = _without_dots(tree, axes)
    _check_labels(tree, right)
    solved = _solved(axes, namespace, tree, left, sizes)
    known, state, steps = dict(namespace), Axes(), list[LayoutOperation]()

    def done(kind: str, before: Axes, after: Axes, items: Iterable[Item]) -> Axes:
        """Note an operation. One name has one layout, also among the names that the expression makes."""
        for item, (name, layout) in zip(items, after.items(), strict=True):
            if known.setdefault(name, layout) != layout:
                raise MeshError(
                    f"'{name}' already is the layout {known[name]}, not {layout}; "
                    f"take another name\n{pointed(tree.text, *item.span)}"
                )
        steps.append(LayoutOperation(kind, before, after))
        return after

    for dim, (axis, layout) in zip(left, axes.items(), strict=True):
        parts = {axis: layout}
        if dim.grouped:
            sized = {name: solved[name] for name in _names(dim)}
            parts = dict(zip(sized, layout.split(list(sized.values())), strict=True))
            done("split", {axis: layout}, parts, leaves([dim]))
        state.update(parts)
    fresh = [factor for factor in leaves(right) if factor.name not in state]
    for factor in fresh:
        if solved.get(factor.name) != 1:
            hint = suggestion(factor.name, state) if factor.name not in solved else ""
            why = f"{shortened(factor.name)} isn't on the left; a new axis has size one, like pp=1{hint}"
            _wrong(tree, why, factor.span)
    if fresh:
        state.update(done("insert", {}, {factor.name: Layout() for factor in fresh}, fresh))
    _check_all_named(tree, right, state)
    ordered = {factor.name: state[factor.name] for factor in leaves(right)}
    if list(ordered) != list(state):
        done("permute", state, ordered, leaves(right))
    result: Axes = {}
    for dim in right:
        own = {name: ordered[name] for name in _names(dim)}
        if dim.grouped:
            own = done("flatten", own, {_label(dim): Layout.product(*own.values())}, [Item("", span=dim.span)])
        result.update(own)
    sides = "  ->  ".join(" ".join(str(_sized(dim, solved)) for dim in side) for side in (left, right))
    return Rearrangement(f"({' '.join(axes)}) read as  {sides}", solved, tuple(steps), result)


def _without_dots(tree: MeshExpression, axes: Axes) -> tuple[Dims, Dims]:
    """Both sides with `...` as the axes that it stands for; the left one has an entry for each axis of the mesh."""
    names = list(axes)
    here, there = (next(filter(has_dots, side), None) for side in (tree.left, tree.right))
    if there is not None and here is None:
        _wrong(tree, "'...' stands on the right only where it stands on the left", there.span)
    if here is not None and there is None:
        _wrong(tree, "'...' stands on the left, so it must stand on the right", here.span)
    count = len(tree.left) - (here is not None)
    if count > len(names) or (count < len(names) and here is None):
        found = f"the mesh has {len(names)} axes ({' '.join(names)}), the left side describes {count}"
        _wrong(tree, found, (0, max(1, tree.text.find("->"))))
    first = 0 if here is None else tree.left.index(here)
    hidden = names[first : first + len(names) - count]
    left, right = (
        [
            each
            for dim in side
            for each in ([Dim((Factor(n, span=dim.span),), span=dim.span) for n in hidden] if has_dots(dim) else [dim])
        ]
        for side in (tree.left, tree.right)
    )
    for dim, name in zip(left, names, strict=True):
        said = dim.factors[0].name
        if not dim.grouped and said != name:
            hint = suggestion(str(said), names) if said not in axes else ""
            _wrong(tree, f"the axis in this place is '{name}', not {shortened(said)}{hint}", dim.span)
    return left, right


def _solved(
    axes: Axes, namespace: Mapping[str, Layout], tree: MeshExpression, left: Dims, sizes: Mapping[str, int | None]
) -> dict[str, int]:
    items = [*leaves(tree.left), *leaves(tree.right)]
    names = [*(item.name for item in items), *(dim.name for dim in tree.right if dim.name)]
    given = given_sizes(sizes, None, items, names)
    known = {name: namespace[name].size for name in (*given, *names) if name in namespace}
    known.update((name, layout.size) for name, layout in axes.items())
    for name, size in given.items():
        if known.setdefault(name, size) != size:
            raise MeshError(f"'{name}' has size {known[name]} in the mesh; found {name}={size}\n  in  {tree.text}")
    products = [
        Product(_names(dim), (), layout.size, f"axis '{name}' has size {layout.size}")
        for dim, (name, layout) in zip(left, axes.items(), strict=True)
        if dim.grouped
    ]
    # A flattened axis may be given its size; it is one more equation.
    products += [Product((dim.name,), _names(dim), 1, str(dim)) for dim in tree.right if dim.name in given]
    return solve(products, known)


def _check_all_named(tree: MeshExpression, right: Dims, state: Axes) -> None:
    there = {factor.name for factor in leaves(right)}
    missing = [name for name in state if name not in there]
    if missing:
        start = tree.text.find("->")
        names = " and ".join(f"'{name}'" for name in missing)
        keep = ", ".join(f'"{name}"' for name in sorted(there & set(state)))
        message = f"{names} must be on the right, too; for a sub-mesh write mesh[{keep or '...'}]"
        _wrong(tree, message, (start, start + 2))


def _check_labels(tree: MeshExpression, right: Dims) -> None:
    """The axes of the result have different names, and a flattened one no name of another axis."""
    home = {factor.name: dim for dim in right for factor in dim.factors}
    seen: set[str] = set()
    for dim in right:
        name = _label(dim)
        if name in seen:
            _wrong(tree, f"the result would have two axes {shortened(name)}", dim.span)
        if dim.grouped and home.get(name, dim) is not dim:
            _wrong(tree, f"{shortened(name)} is another axis of the expression; take another name", dim.span)
        seen.add(name)


def _names(dim: Dim) -> tuple[str, ...]:
    return tuple([str(factor.name) for factor in dim.factors])


def _label(dim: Dim) -> str:
    return dim.name or "_".join(_names(dim))


def _sized(dim: Dim, sizes: Mapping[str, int]) -> Dim:
    return replace(dim, factors=tuple([Factor(name, sizes.get(name, 1)) for name in _names(dim)]))


def _wrong(tree: MeshExpression, message: str, span: tuple[int, int]) -> NoReturn:
    raise ExpressionError(message, tree.text, *span)
