"""Mesh expressions, `"(dp cp) tp -> dp fsdp=(cp tp)"`: from text to layout operations.

The left side is matched with the mesh's axes in order; its groups are splits. The right side is
read as an order of what there is then, and its groups are flattened. So there are at most four
kinds of operations: split, insert (axes of size one), permute, flatten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from axes.algebra.equations import Namespace
from axes.algebra.errors import ExpressionError, MeshError, pointed, shortened, suggestion
from axes.algebra.explanation import Explanation, Section
from axes.algebra.grammar import Ellipsis_, Group, Item, MeshExpression, Side, leaves, parse_mesh
from axes.algebra.layout import Layout
from axes.algebra.sizes import Product, given_sizes, solve

Axes = dict[str, Layout]
Entries = tuple[Item | Group, ...]


@dataclass(frozen=True)
class LayoutOperation:
    """One operation on the axes of a mesh: the axes `before` are replaced by the axes `after`."""

    kind: str
    before: tuple[tuple[str, Layout], ...]
    after: tuple[tuple[str, Layout], ...]

    def __str__(self) -> str:
        def listed(axes: Sequence[tuple[str, Layout]]) -> str:
            return ", ".join(f"{name} {layout}" for name, layout in axes)

        if self.kind == "permute":
            return f"permute  {' '.join(name for name, _ in self.after)}"
        before = f"{listed(self.before)}  ->  " if self.before else ""
        return f"{self.kind:<8} {before}{listed(self.after)}"


@dataclass(frozen=True)
class Rearrangement:
    """What an expression compiles to on one mesh: how it was read, and the operations."""

    axes: tuple[tuple[str, Layout], ...]
    left: Entries
    right: Entries
    sizes: Mapping[str, int]
    steps: tuple[LayoutOperation, ...]

    def run(self) -> tuple[Axes, Axes]:
        """The axes of the result in order, and every name that was made."""
        axes: Axes = dict(self.axes)
        made: Axes = {}
        for step in self.steps:
            if step.kind in ("permute", "insert"):
                axes = dict(step.after) if step.kind == "permute" else {**axes, **dict(step.after)}
            else:
                axes = _replaced(axes, step)
            made.update(step.after)
        return axes, made

    def explanation(self) -> Explanation:
        """The reading, and what is done step by step."""
        rows = tuple([(str(step),) for step in self.steps]) or (("nothing to do",),)
        facts = {
            "kind": "mesh",
            "read": _reading(self),
            "sizes": dict(self.sizes),
            "steps": [
                {"kind": step.kind, "before": _names(step.before), "after": _names(step.after)} for step in self.steps
            ],
        }
        return Explanation(_reading(self), (Section("", rows),), facts)


def _names(axes: Sequence[tuple[str, Layout]]) -> dict[str, str]:
    return {name: str(layout) for name, layout in axes}


def compile(axes: Axes, namespace: Namespace, expression: str, sizes: Mapping[str, int | None]) -> Rearrangement:
    """The layout operations of a mesh expression on a mesh with these axes, in order, and these names.

    Raises `ExpressionError` with a caret where the expression isn't about this mesh, `SizeError`
    for sizes that don't follow, `MeshError` where a name already means other ranks.
    """
    tree = parse_mesh(expression)
    left, hidden = _matched(tree, tree.left, axes)
    right = _opened(tree, tree.right, hidden)
    _distinct(tree, right)
    solved = _solved(axes, namespace, tree, left, sizes)
    steps: list[LayoutOperation] = []
    state: Axes = {}
    known: Axes = dict(namespace)
    for entry, (name, layout) in zip(left, axes.items(), strict=True):
        if isinstance(entry, Group):
            parts = dict(zip((i.name for i in entry.items), _split(layout, entry, solved), strict=True))
            _agree(known, tree, entry.items, parts)
            steps.append(LayoutOperation("split", ((name, layout),), tuple(parts.items())))
            state.update(parts)
        else:
            state[name] = layout
    _insert(known, tree, right, state, solved, steps)
    _same_names(tree, right, state)
    ordered = {item.name: state[item.name] for item in leaves(right)}
    if list(ordered) != list(state):
        steps.append(LayoutOperation("permute", tuple(state.items()), tuple(ordered.items())))
    for entry in right:
        if isinstance(entry, Group):
            names = [item.name for item in entry.items]
            label = entry.name or "_".join(names)
            flat = {label: Layout.product(*(ordered[name] for name in names))}
            _agree(known, tree, [Item(label, None, entry.span)], flat)
            steps.append(LayoutOperation("flatten", tuple((n, ordered[n]) for n in names), tuple(flat.items())))
    return Rearrangement(tuple(axes.items()), left, right, solved, tuple(steps))


def _matched(tree: MeshExpression, side: Side, axes: Axes) -> tuple[Entries, tuple[Item, ...] | None]:
    """The left side, an entry per axis of the mesh, names checked; and what its `...` stands for."""
    names = list(axes)
    dots = next((i for i, entry in enumerate(side) if isinstance(entry, Ellipsis_)), None)
    spare = len(names) - len(side) + (dots is not None)
    if (dots is None and spare) or spare < 0:
        found = f"the mesh has {len(names)} axes ({' '.join(names)}), the left side describes "
        _wrong(tree, f"{found}{len(side) - (dots is not None)}", (0, max(1, tree.text.find("->"))))
    hidden: tuple[Item, ...] | None = None
    if dots is not None:
        hidden = tuple(Item(name, span=side[dots].span) for name in names[dots : dots + spare])
        side = (*side[:dots], *hidden, *side[dots + 1 :])
    found_entries: list[Item | Group] = []
    for entry, name in zip(side, names, strict=True):
        if isinstance(entry, Item) and entry.name != name:
            hint = suggestion(entry.name, names) if entry.name not in names else ""
            _wrong(tree, f"the axis in this place is '{name}', not {shortened(entry.name)}{hint}", entry.span)
        if not isinstance(entry, Ellipsis_):
            found_entries.append(entry)
    return tuple(found_entries), hidden


def _opened(tree: MeshExpression, side: Side, hidden: tuple[Item, ...] | None) -> Entries:
    """The right side with `...` replaced by what the left side's stands for."""
    found: list[Item | Group] = []
    for entry in side:
        if not isinstance(entry, Ellipsis_):
            found.append(entry)
        elif hidden is None:
            _wrong(tree, "'...' stands on the right only where it stands on the left", entry.span)
        else:
            found.extend(Item(item.name, span=entry.span) for item in hidden)
    if hidden is not None and not any(isinstance(entry, Ellipsis_) for entry in side):
        dots = next(entry for entry in tree.left if isinstance(entry, Ellipsis_))
        _wrong(tree, "'...' stands on the left, so it must stand on the right", dots.span)
    return tuple(found)


def _solved(
    axes: Axes,
    namespace: Namespace,
    tree: MeshExpression,
    left: Sequence[Item | Group],
    sizes: Mapping[str, int | None],
) -> dict[str, int]:
    items = (*leaves(tree.left), *leaves(tree.right))
    labels = [entry.name for entry in tree.right if isinstance(entry, Group) and entry.name]
    given = given_sizes(sizes, None, items, [*(item.name for item in items), *labels])
    known = {name: namespace[name].size for name in (*given, *(i.name for i in items)) if name in namespace}
    known.update((name, layout.size) for name, layout in axes.items())
    products = [
        Product(tuple(item.name for item in entry.items), (), layout.size, f"axis '{name}' has size {layout.size}")
        for entry, (name, layout) in zip(left, axes.items(), strict=True)
        if isinstance(entry, Group)
    ]
    for name, size in given.items():
        if known.setdefault(name, size) != size:
            raise MeshError(f"'{name}' has size {known[name]} in the mesh; found {name}={size}\n  in  {tree.text}")
    # A flattened axis may be given its size; it is one more equation.
    products.extend(
        Product((entry.name,), tuple(item.name for item in entry.items), 1, str(entry))
        for entry in tree.right
        if isinstance(entry, Group) and entry.name in given
    )
    return solve(products, known)


def _split(layout: Layout, group: Group, sizes: Mapping[str, int]) -> tuple[Layout, ...]:
    return layout.split([sizes[item.name] for item in group.items])


def _insert(
    names: Axes,
    tree: MeshExpression,
    right: Sequence[Item | Group],
    state: Axes,
    sizes: Mapping[str, int],
    steps: list[LayoutOperation],
) -> None:
    """Axes of size one that the right side adds."""
    fresh = [item for item in leaves(tuple(right)) if item.name not in state]
    for item in fresh:
        if sizes.get(item.name) != 1:
            hint = suggestion(item.name, state) if item.name not in sizes else ""
            _wrong(
                tree, f"{shortened(item.name)} isn't on the left; a new axis has size one, like pp=1{hint}", item.span
            )
    new = {item.name: Layout() for item in fresh}
    _agree(names, tree, fresh, new)
    if new:
        steps.append(LayoutOperation("insert", (), tuple(new.items())))
        state.update(new)


def _same_names(tree: MeshExpression, right: Sequence[Item | Group], state: Axes) -> None:
    there = {item.name for item in leaves(tuple(right))}
    missing = [name for name in state if name not in there]
    if missing:
        start = tree.text.find("->")
        names = " and ".join(f"'{name}'" for name in missing)
        keep = ", ".join(f'"{name}"' for name in sorted(there & set(state)))
        _wrong(
            tree, f"{names} must be on the right, too; for a sub-mesh write mesh[{keep or '...'}]", (start, start + 2)
        )


def _distinct(tree: MeshExpression, right: Sequence[Item | Group]) -> None:
    seen: set[str] = set()
    home = {item.name: entry for entry in right for item in leaves((entry,))}
    for entry in right:
        name = entry.name if isinstance(entry, Item) else entry.name or "_".join(i.name for i in entry.items)
        if name in seen:
            _wrong(tree, f"the result would have two axes {shortened(name)}", entry.span)
        if isinstance(entry, Group) and home.get(name, entry) is not entry:
            _wrong(tree, f"{shortened(name)} is another axis of the expression; take another name", entry.span)
        seen.add(name)


def _agree(names: Axes, tree: MeshExpression, items: Sequence[Item], layouts: Axes) -> None:
    """One name, one layout: also among the `names` that the expression itself has made so far."""
    for item in items:
        known = names.setdefault(item.name, layouts[item.name])
        if known != layouts[item.name]:
            raise MeshError(
                f"'{item.name}' already is the layout {known}, not {layouts[item.name]}; "
                f"take another name\n{pointed(tree.text, *item.span)}"
            )


def _replaced(axes: Axes, step: LayoutOperation) -> Axes:
    before = [name for name, _ in step.before]
    found: Axes = {}
    for name, layout in axes.items():
        if name == before[0]:
            found.update(step.after)
        elif name not in before:
            found[name] = layout
    return found


def _reading(made: Rearrangement) -> str:
    sizes = made.sizes

    def text(entry: Item | Group) -> str:
        if isinstance(entry, Item):
            return f"{entry.name}={sizes.get(entry.name, 1)}"
        return str(Group(tuple(Item(item.name, sizes[item.name]) for item in entry.items), entry.name))

    sides = "  ->  ".join(" ".join(map(text, side)) for side in (made.left, made.right))
    return f"({' '.join(name for name, _ in made.axes)}) read as  {sides}"


def _wrong(tree: MeshExpression, message: str, span: tuple[int, int]) -> NoReturn:
    raise ExpressionError(message, tree.text, *span)
