"""Meshes: named axes over a universe of ranks, and every further name for the same ranks.

>>> mesh = Mesh(
...     "pp dp_shard cp tp",
...     "fsdp = dp_shard cp",                    # another name for two axes
...     "(dp_shard cp tp) = efsdp ep",           # another factorization of the same ranks
...     pp=2, cp=2, tp=4, ep=8, ranks=range(64),  # dp_shard and efsdp follow
... )
>>> mesh.shape
{'pp': 2, 'dp_shard': 4, 'cp': 2, 'tp': 4}
>>> mesh.names["efsdp"], mesh.layout("fsdp"), list(mesh.at(5).axis("ep").ranks)
(4, 8:4, [0, 1, 2, 3, 4, 5, 6, 7])

An axis is a name and a `Layout`, the digits of the rank that it reads. A mesh is an ordered tuple
of axes that share no digit, with a namespace in which each name means one layout. It is immutable;
what changes it returns a new one. Everything costs O(axes), whatever the number of ranks, except
listing ranks.

The model is JAX's `Mesh` over CuTe's layouts; `DeviceMesh` has the same axes without the names'
algebra.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from axes.algebra import providers
from axes.algebra.errors import MeshError, shown, unknown_axis
from axes.algebra.grammar import checked_text, parse_declaration, parse_equation
from axes.algebra.layout import Digit, Layout, Universe, checked_layout
from axes.algebra.mesh_names import declared, defined, rearranged
from axes.algebra.opaque import DeviceMesh, ProcessGroup
from axes.algebra.sharding import Sharding
from axes.algebra.sizes import checked_rank, written_sizes
from axes.algebra.specs import parsed_sharding

_DECLARED = ". A mesh is declared by names and sizes, like 'dp=2 tp=4'"


_FIELDS = ("universe", "axis_names", "namespace", "ranks_per_node", "binding", "_view")
"""What makes a mesh; all else follows."""


class Mesh(providers.Pictured):
    """Named axes over ranks. It is algebra: it needs no process and no device, for any number of ranks.

    `axes.init_mesh` makes the same mesh bound to a job. Like `torch.distributed.DeviceMesh` and JAX's `Mesh`, with
    further names for the same ranks.

    Args:
        declaration: The axes, slowest first: `"pp dp=2 tp"`. A size that is left out follows from the number of
            ranks.
        *equations: Further names for the same ranks: `"fsdp = dp cp"`, `"(dp cp) = rows cols"`.
        ranks: Distinct global ranks in the order of the mesh; by default as many as the sizes multiply to, from 0.
        ranks_per_node: How many consecutive ranks share a node, for the cost model.
        sizes: Sizes of names, for names that collide with a parameter.
        **keywords: Sizes of names.

    Raises:
        ExpressionError: The text isn't a declaration.
        SizeError: Sizes don't follow, don't divide or disagree.
        MeshError: Names or ranks aren't valid.

    Examples:
        >>> Mesh("dp tp=4", ranks=range(8)).shape
        {'dp': 2, 'tp': 4}
    """

    universe: Universe
    axis_names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    namespace: Mapping[str, Layout]
    ranks_per_node: int | None
    binding: Any
    layout_of_all: Layout
    extent: Layout
    size: int
    _key: tuple[object, ...]
    _hash: int
    _view: int | None

    def __init__(
        self,
        declaration: str,
        /,
        *equations: str,
        ranks: Iterable[int] | None = None,
        ranks_per_node: int | None = None,
        sizes: Mapping[str, int] | None = None,
        **keywords: int,
    ):
        items = parse_declaration(checked_text(declaration, _DECLARED))
        parsed = [parse_equation(text) for text in equations]
        universe = None if ranks is None else Universe.of(ranks)
        world_size = None if universe is None else universe.size
        namespace = declared(items, parsed, world_size, keywords, sizes)
        names = tuple(item.name for item in items)
        if universe is None:
            universe = Universe(range(math.prod(namespace[name].size for name in names)))
        node = None if ranks_per_node is None else checked_rank("ranks_per_node", ranks_per_node, 1)
        self.__setstate__(dict(zip(_FIELDS, (universe, names, namespace, node, None, None), strict=True)))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    def __setstate__(self, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(zip(_FIELDS, fields.values(), strict=True))
        layouts = tuple([self.namespace[name] for name in self.axis_names])
        whole = _whole(self.axis_names, layouts)
        extent = Layout._joined(sorted(whole, key=lambda digit: -digit[1]))
        key = (self.universe, self.axis_names, tuple(self.namespace.items()), self.ranks_per_node, self.binding)
        self.__dict__.update(layouts=layouts, layout_of_all=whole, extent=extent, size=whole.size, _key=key)
        self.__dict__["_hash"] = hash(key)

    def _with(self, **changed: Any) -> Mesh:
        mesh = object.__new__(Mesh)
        mesh.__setstate__({**self.__getstate__(), **changed})
        return mesh

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Mesh is immutable")

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """The mesh that adopts a torch `DeviceMesh` with its names and process groups.

        Raises `MeshError` for a device mesh without names, or whose groups don't have the order of
        its coordinates.
        """
        return providers.module("runtime", "Mesh.from_device_mesh").from_device_mesh(device_mesh)

    # values

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.axis_names)

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, in order."""
        return {name: layout.size for name, layout in zip(self.axis_names, self.layouts, strict=True)}

    @property
    def axes(self) -> dict[str, Layout]:
        """Layout of each axis, in order."""
        return dict(zip(self.axis_names, self.layouts, strict=True))

    @property
    def names(self) -> dict[str, int]:
        """Every name of the namespace with its size, axes first as declared."""
        return {name: layout.size for name, layout in self.namespace.items()}

    @property
    def rank(self) -> int:
        """The global rank that the mesh is seen from: this process's, or that of `at`.

        Algebra that isn't bound to a job is seen from its first rank.
        """
        if self._view is not None:
            return self._view
        return providers.module("runtime", "mesh.rank").rank() if self.binding is not None else self.universe.ranks[0]

    def layout(self, name: str) -> Layout:
        """What a name means; `MeshError` with the nearest name for one that isn't known.

        Examples:
            >>> Mesh("dp=2 tp=4").layout("dp")
            2:4
        """
        found = self.namespace.get(name) if isinstance(name, str) else None
        if found is None:
            raise unknown_axis(name, self.namespace)
        return found

    def axis(self, name: str) -> Axis:
        """The axis of a name, seen from this mesh's rank.

        Examples:
            >>> Mesh("dp=2 tp=4").at(6).axis("tp").index
            2
        """
        return Axis(self, name, self.layout(name))

    def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
        """The sub-mesh with these axes in this order; any name of the namespace.

        Raises `MeshError` where two of them share ranks.

        >>> Mesh("dp=2 cp=2 tp=2", "fsdp = dp cp")["tp", "fsdp"].shape
        {'tp': 2, 'fsdp': 4}
        """
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, tuple) or not wanted:
            raise MeshError(f"a mesh is indexed by one or more axis names; found {shown(names)}")
        for name in wanted:
            self.layout(name)
        return self._with(axis_names=wanted)

    def get(self, *names: str) -> Mesh | None:
        """The sub-mesh with these axes, or None where it would be of one rank, so that there is nothing to do on it.

        Raises what `mesh[names]` raises; a name that the mesh doesn't have is an error, too.

        Examples:
            >>> mesh = Mesh("dp=2 tp=1")
            >>> mesh.get("dp"), mesh.get("tp")
            (Mesh('dp=2 tp=1')['dp'], None)
        """
        found = self[names]
        return found if found.size > 1 else None

    # ranks

    @property
    def coordinate(self) -> dict[str, int] | None:
        """This rank's coordinate on each axis, or None outside the mesh's ranks.

        Examples:
            >>> Mesh("dp=2 tp=4").at(6).coordinate
            {'dp': 1, 'tp': 2}
        """
        position = self.universe.position(self.rank)
        if position is None:
            return None
        return {name: self.namespace[name].coordinate(position) for name in self.axis_names}

    @property
    def ranks(self) -> list[Any]:
        """Global ranks as nested lists, one level per axis: of the mesh that holds this rank.

        Examples:
            >>> Mesh("dp=2 tp=2", ranks=[0, 2, 1, 3]).ranks
            [[0, 2], [1, 3]]
        """
        flat = self.ranks_of(self.layout_of_all)
        if flat is None:
            if self.size < self.universe.size:
                raise MeshError(
                    f"rank {self.rank} isn't in any of the meshes of {self!r}; look from another with mesh.at(rank)"
                )
            flat = self.universe.pick(self.layout_of_all.offsets())
        nested: list[Any] = list(flat)
        for layout in reversed(self.layouts[1:]):
            nested = [nested[i : i + layout.size] for i in range(0, len(nested), layout.size)]
        return nested

    def ranks_of(self, layout: Layout, rank: int | None = None) -> Sequence[int] | None:
        """Global ranks along `layout` through `rank` (this one by default), in coordinate order.

        None where the rank isn't in the universe. A range where the ranks are evenly spaced.
        """
        rank = self.rank if rank is None else checked_rank("a rank", rank)
        return None if self.universe.position(rank) is None else self.universe.group(checked_layout(layout), rank)

    def _position(self, rank: int | None = None) -> int:
        """Where a global rank, this one by default, lies in the universe; `MeshError` for one outside."""
        rank = self.rank if rank is None else checked_rank("a rank", rank)
        position = self.universe.position(rank)
        if position is None:
            raise MeshError(f"rank {rank} isn't one of the ranks of {self!r}")
        return position

    def at(self, rank: int) -> Mesh:
        """The same mesh seen from another global rank, a member or not.

        Examples:
            >>> Mesh("dp=2 tp=4").at(5).coordinate
            {'dp': 1, 'tp': 1}
        """
        return self._seen_from(checked_rank("a rank", rank))

    def _seen_from(self, view: int | None) -> Mesh:
        if view == self._view:
            return self
        mesh = object.__new__(Mesh)
        mesh.__dict__.update(self.__dict__, _view=view)
        return mesh

    # new meshes

    def rearrange(self, expression: str, /, *, sizes: Mapping[str, int] | None = None, **keywords: int) -> Mesh:
        """The mesh with its axes split, flattened, renamed or reordered by a mesh expression.

        The left side describes the axes as they are, in order; the right side lists those of the
        result. `(dp cp)` on the left splits an axis, `fsdp=(dp cp)` on the right flattens, `pp=1`
        adds an axis of size one, `...` stands for the axes that aren't named. New names join the
        namespace. Cached by mesh and text.

        Raises `ExpressionError`, `SizeError`, and `MeshError` where a name already means other ranks.

        Examples:
            >>> mesh = Mesh("dp=8 tp=2")
            >>> mesh.rearrange("(replicate shard) tp -> replicate fsdp=(shard tp)", shard=4).shape
            {'replicate': 2, 'fsdp': 8}
        """
        given = written_sizes(keywords, sizes)
        checked_text(expression)
        return _rearranged(self._seen_from(None), expression, given)._seen_from(self._view)

    def explain(self, expression: str, /, *, sizes: Mapping[str, int] | None = None, **keywords: int) -> Any:
        """How `rearrange` reads an expression: the sizes solved and the layout operations.

        Examples:
            >>> print(Mesh("dp=8 tp=2").explain("(a b) tp -> tp a b", a=2))
            (dp tp) read as  (a=2 b=4) tp=2  ->  tp=2 a=2 b=4
              split    dp 8:2  ->  a 2:8, b 4:2
              permute  tp a b
        """
        facts = rearranged(self.axis_names, self.namespace, expression, dict(written_sizes(keywords, sizes)))[2]
        return providers.module("pictures", "an explanation").explained_mesh(facts)

    def define(self, /, *equations: str, sizes: Mapping[str, int] | None = None, **keywords: int) -> Mesh:
        """The mesh with more names for the same ranks.

        Examples:
            >>> Mesh("dp=2 cp=2 tp=2").define("loss = dp cp").names["loss"]
            4
        """
        parsed = [parse_equation(text) for text in equations]
        return self._with(namespace=defined(self.namespace, parsed, keywords, sizes))

    def _knowing(self, other: Mesh, names: Iterable[str]) -> Mesh:
        """The mesh with what these names mean on another mesh of the same ranks.

        Raises `MeshError` where they mean other ranks here.

        >>> Mesh("dp=2 cp=2")._knowing(Mesh("all=4"), ["all"]).names
        {'dp': 2, 'cp': 2, 'all': 4}
        """
        further = {name: other.layout(name) for name in names}
        for name, layout in further.items():
            if self.namespace.get(name, layout) != layout:
                raise MeshError(
                    f"'{name}' is {self.described(name)} of {self!r}, on which the tensor is, and other ranks on "
                    f"{other!r}; two meshes that meet give a name one meaning, so rename one"
                )
        if further.keys() <= self.namespace.keys():
            return self
        return self._with(namespace={**self.namespace, **further})

    @staticmethod
    def ambient(what: str, mesh: Mesh | None = None) -> Mesh:
        """The mesh that is given, else the ambient one; `MeshError`, which names `what` needs it, where there is none.

        Examples:
            >>> with Mesh("dp=2 tp=4"):
            ...     Mesh.ambient("the trainer").shape
            {'dp': 2, 'tp': 4}
        """
        return required_mesh(mesh, what)

    def sharding(
        self,
        spec: str,
        shape: Sequence[int] | None = None,
        /,
        *,
        sizes: Mapping[str, int] | None = None,
        **keywords: int,
    ) -> Sharding:
        """How a tensor is sharded on this mesh: `"batch@dp seq@(cp tp) embed | sum@ep"`.

        With a `shape` it is that of a DTensor: the spec may have `...`, groups have the sizes of the tensor, and where
        DTensor would cut it otherwise, a `ShardingError` says so.

        `sizes` and keywords are the sizes of factors of grouped dims, where they can't be left open.
        Raises `MeshError` for an axis that the mesh doesn't have, `ShardingError` for one that is used twice.

        Examples:
            >>> Mesh("dp=2 tp=4").sharding("b@dp (h@tp d)", h=8).local_shape((4, 64))
            (2, 16)
        """
        given = written_sizes(keywords, sizes)
        if shape is None:
            return parsed_sharding(self, spec, given)
        found: Sharding = providers.module("runtime", "mesh.sharding").sharding_in_torch(self, spec, shape, given)
        return found

    # the running job

    @property
    def device_mesh(self) -> DeviceMesh:
        """The torch `DeviceMesh` of the axes, the same object for equal meshes.

        Meshes of one universe share one root, so that FSDP2 can combine them.
        """
        return self._bound("device_mesh").device_mesh(self)

    def create_groups(self, /, *names: str) -> None:
        """Makes process groups now, in this order on every rank; all axes of the mesh without names.

        Groups are otherwise made when they are first used, and ranks that first use two overlapping
        groups in different orders wait for each other.
        """
        self._bound("create_groups").create_groups(self, names or self.axis_names)

    def abort(self) -> None:
        """Ends the process groups of the mesh now, without the other ranks: for a rank that gives up.

        All groups that axes made among the mesh's ranks are ended, those of other meshes of the same ranks
        too, and torch's default group where `init_mesh` started it and the mesh covers it. NCCL ends what is
        underway, on other threads too; over gloo that ends with its own timeout. A mesh whose default group
        lives can be used again where all its ranks have aborted: groups are made anew.
        """
        self._bound("abort").abort(self)

    def _bound(self, what: str) -> Any:
        """The runtime, for what only the process that the mesh is seen from can have."""
        if self.binding is None:
            raise MeshError(
                f"{what} needs a mesh that is bound to torch.distributed; this one has no processes. "
                "Make it with axes.init_mesh(...)"
            )
        runtime = providers.module("runtime", what)
        if self._view is not None and self._view != runtime.rank():
            raise MeshError(f"{what} belongs to this process; the mesh is seen from rank {self._view} (mesh.at)")
        return runtime

    def __enter__(self) -> Mesh:
        push_mesh(self)
        return self

    def __exit__(self, *_: object) -> None:
        pop_mesh()

    # identity and text

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Mesh) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @property
    def declared(self) -> tuple[str, ...]:
        """The first names that share no ranks, if they have all ranks; else the axes.

        Examples:
            >>> Mesh("dp=2 tp=4", "all = dp tp")["tp",].declared
            ('dp', 'tp')
        """
        found: list[str] = []
        for name, layout in self.namespace.items():
            if not any(layout.overlaps(self.namespace[other]) for other in found):
                found.append(name)
        is_whole = math.prod(self.namespace[name].size for name in found) == self.universe.size
        return tuple(found) if is_whole else self.axis_names

    @property
    def declaration(self) -> str:
        """Canonical text: axes with sizes, then every further name; equal for equal namespaces.

        Examples:
            >>> Mesh("dp=2 cp=2 tp=2", "fsdp = dp cp").declaration
            'dp=2 cp=2 tp=2; fsdp = dp cp'
        """
        return "; ".join(
            [self._sizes(self.axis_names), *(f"{name} = {self.described(name)}" for name in self._further())]
        )

    def described(self, name: str) -> str:
        """A name in terms of the axes, or of its digits where it cuts them.

        Examples:
            >>> mesh = Mesh("dp=4 tp=2", "(dp tp) = rows ep", ep=4)
            >>> mesh.described("ep")
            '4:1'
        """
        layout = self.layout(name)
        return " ".join(self.factored(layout) or [str(layout)])

    def factored(self, layout: Layout) -> list[str] | None:
        """The axes of the mesh whose product, in that order, is `layout`; None where it cuts one.

        Examples:
            >>> Mesh("dp=2 cp=2 tp=2").factored(Layout((2, 2), (1, 4)))
            ['tp', 'dp']
        """
        parts = self.parts(layout, self.layouts)
        return [self.called(part) for part in parts] if {*self.layouts}.issuperset(parts) else None

    def calls(self, layout: Layout) -> tuple[str, ...]:
        """A layout by the longest names that the mesh has for its digits; what has none is called by its digits.

        Examples:
            >>> mesh = Mesh("dp=2 cp=2 tp=2", "both = dp cp")
            >>> print(*mesh.calls(Layout((2, 4), (1, 2))), *mesh.calls(Layout((8,), (1,))))
            tp both both tp
        """
        return tuple(map(self.called, self.parts(layout)))

    def parts(self, layout: Layout, among: Iterable[Layout] | None = None) -> tuple[Layout, ...]:
        """A layout as the longest ones that have a name, or are `among` these, in order; its digits where none is."""
        names = self.namespace.values() if among is None else among
        known = sorted([each for each in names if each.size > 1], key=lambda each: -each.size)
        found, rest = list[Layout](), list(layout)
        while rest:
            part = next((each for each in known if _behind(rest, each) is not None), Layout._joined(rest[:1]))
            found.append(part)
            rest = _behind(rest, part) or []
        return tuple(found)

    def called(self, layout: Layout) -> str:
        """The axis that has a layout, or the first further name that the mesh has for it, else its digits.

        Examples:
            >>> Mesh("dp=2 tp=2").called(Layout((2,), (2,)))
            'dp'
        """
        names = (*self.axis_names, *self.namespace)
        return next((name for name in names if self.namespace[name] == layout), str(layout))

    def splits(self, names: Iterable[str]) -> tuple[Layout, ...]:
        """Axes by name as what they split: an axis of one rank splits nothing, and is left out.

        Raises `MeshError` for a name that isn't one.

        Examples:
            >>> Mesh("dp=2 pp=1").splits(["pp", "dp"])
            (2:1,)
        """
        return tuple([layout for layout in map(self.layout, names) if layout.size > 1])

    def along(self, layout: Layout) -> Mesh:
        """The mesh of this rank's line along a layout, as one axis: who is elsewhere isn't of it."""
        if layout == self.extent:
            return self
        name = " ".join(self.calls(layout)) or "1"
        return self._with(axis_names=(name,), namespace={**self.namespace, name: layout})

    def made_of(self, layouts: Iterable[Layout]) -> list[str] | None:
        """The axes of the mesh that have the digits of `layouts` in any order; None where those cut an axis.

        Examples:
            >>> Mesh("dp=2 tp=4").made_of([Layout((2,), (2,)), Layout((2,), (1,))])
            ['tp']
        """
        whole = Layout.product(*layouts)
        made = [name for name, axis in self.axes.items() if axis.size > 1 and whole.contains(axis)]
        return made if math.prod(self.namespace[name].size for name in made) == whole.size else None

    def _further(self) -> list[str]:
        return [name for name in self.namespace if name not in self.axis_names]

    def __repr__(self) -> str:
        """The axes as they were declared, and of those a sub-mesh.

        >>> Mesh("dp=4 tp=2", ranks=range(8, 16))["tp"]
        Mesh('dp=4 tp=2', ranks=range(8, 16))['tp']
        """
        declared = self.declared
        nodes = "" if self.ranks_per_node is None else f", ranks_per_node={self.ranks_per_node}"
        part = "" if declared == self.axis_names else f"[{', '.join(map(repr, self.axis_names))}]"
        return f"Mesh({self._sizes(declared)!r}{self._where(64)}{nodes}){part}"

    def _sizes(self, names: Iterable[str]) -> str:
        return " ".join(f"{name}={self.namespace[name].size}" for name in names)

    def _where(self, most: int) -> str:
        ranks = self.universe.ranks
        return "" if ranks == range(len(ranks)) else f", ranks={listed(ranks, most)}"

    def __str__(self) -> str:
        rows = [(name, self.namespace[name], "") for name in self.axis_names]
        rows += [(name, self.namespace[name], "= " + self.described(name)) for name in self._further()]
        width = max(len(name) for name, _, _ in rows)
        lines = [
            f"Mesh({self._sizes(self.axis_names)!r}{self._where(8)})  {self.size} ranks, seen from rank {self.rank}"
        ]
        for name, layout, text in rows:
            index = "-" if self.coordinate is None else self.axis(name).index
            lines.append(
                f"  {name:<{width}}  size {layout.size:<6} layout {layout!s:<14} index {index:<6} {text}".rstrip()
            )
        return "\n".join(lines)


class Axis:
    """One axis of a mesh, seen from the mesh's rank: a name and its ranks.

    Examples:
        >>> axis = Mesh("dp=2 tp=4").at(6).axis("dp")
        >>> axis.name, axis.size, axis.stride, axis.index, list(axis.ranks)
        ('dp', 2, 4, 1, [2, 6])
    """

    __slots__ = ("layout", "mesh", "name")

    def __init__(self, mesh: Mesh, name: str, layout: Layout):
        self.mesh, self.name, self.layout = mesh, name, layout

    @property
    def size(self) -> int:
        """The number of ranks along the axis."""
        return self.layout.size

    @property
    def stride(self) -> int | tuple[int, ...]:
        """Positions between neighbours; a tuple where the axis reads several digits."""
        strides = self.layout.strides
        return (strides or (1,))[0] if len(strides) <= 1 else strides

    @property
    def index(self) -> int | None:
        """This rank's coordinate, or None outside the mesh's ranks."""
        position = self.mesh.universe.position(self.mesh.rank)
        return None if position is None else self.layout.coordinate(position)

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks along the axis through this rank, in coordinate order."""
        return self.ranks_of(self.mesh.rank)

    def ranks_of(self, rank: int) -> Sequence[int]:
        """Global ranks along the axis through any rank; `MeshError` for one outside the mesh.

        Examples:
            >>> list(Mesh("dp=2 tp=4").axis("tp").ranks_of(6))
            [4, 5, 6, 7]
        """
        universe = self.mesh.universe
        return universe.group(self.layout, universe.ranks[self.mesh._position(rank)])

    def all_ranks(self) -> list[Sequence[int]]:
        """The ranks of every line along the axis; each rank of the universe is in one.

        Examples:
            >>> [list(line) for line in Mesh("dp=2 tp=2").axis("dp").all_ranks()]
            [[0, 2], [1, 3]]
        """
        ranks = self.mesh.universe.ranks
        firsts = sorted(self.layout.complement(len(ranks)).offsets())
        return [self.ranks_of(ranks[position]) for position in firsts]

    @property
    def group(self) -> ProcessGroup:
        """The torch `ProcessGroup` of this rank's line; rank i of the group is coordinate i.

        One communicator per ordered list of ranks, whoever asks and under whatever name.
        """
        return self.mesh._bound("axis.group").group(self.mesh, self.layout, self.name)

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, size={self.size}, layout={self.layout})"


# --- the ambient mesh: what names mean where no mesh is passed ------------------------------------


class _Stack(threading.local):
    def __init__(self) -> None:
        self.meshes: list[Mesh] = []
        self.rules: list[Any] = []


ambient_stack = _Stack()
"""The meshes, and the rules for logical names, that blocks of this thread have entered, the innermost last. Each thread
has its own, since backward runs in threads of autograd's."""


def ambient_mesh() -> Mesh | None:
    """The innermost mesh of this thread, or None.

    This, `push_mesh` and `pop_mesh` have another body in compiled graphs: see `axes.runtime.graphs`.

    >>> with Mesh("dp=2 tp=4") as mesh:
    ...     ambient_mesh() is mesh
    True
    """
    return ambient_stack.meshes[-1] if ambient_stack.meshes else None


def push_mesh(mesh: Mesh) -> None:
    """Makes `mesh` the ambient one until `pop_mesh`."""
    ambient_stack.meshes.append(mesh)


def pop_mesh() -> None:
    """Returns to the mesh that was ambient before."""
    ambient_stack.meshes.pop()


@contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Make a mesh the ambient mesh of a block: calls without `mesh=` use it.

    Also written `with mesh:`, which `torch.compile` can't enter. Like JAX's `jax.set_mesh`.

    Args:
        mesh: The mesh.

    Raises:
        MeshError: `mesh` isn't a mesh.

    Examples:
        >>> with use_mesh(Mesh("dp=2 tp=4")):
        ...     required_mesh(None, "shard").size
        8
    """
    push_mesh(checked_mesh(mesh))
    try:
        yield mesh
    finally:
        pop_mesh()


def required_mesh(mesh: Mesh | None, what: str) -> Mesh:
    """`mesh`, else the ambient one; `MeshError` that says so where there is neither."""
    found = mesh if mesh is not None else ambient_mesh()
    if found is None:
        raise MeshError(f"{what} needs a mesh; pass mesh=... or write it inside `with mesh:`")
    return checked_mesh(found)


def checked_mesh(mesh: Mesh) -> Mesh:
    """`mesh`; `MeshError` for what is none."""
    if not isinstance(mesh, Mesh):
        kind = type(mesh).__name__
        hint = "\naxes.Mesh.from_device_mesh makes one of torch's" if kind == "DeviceMesh" else ""
        raise MeshError(f"a mesh is an axes mesh, made by axes.init_mesh; found {kind}: {shown(mesh)}{hint}")
    return mesh


@functools.lru_cache(maxsize=4096)
def _rearranged(mesh: Mesh, expression: str, sizes: tuple[tuple[str, int], ...]) -> Mesh:
    names, namespace, _ = rearranged(mesh.axis_names, mesh.namespace, expression, dict(sizes))
    return mesh._with(axis_names=names, namespace=namespace)


def listed(ranks: range | tuple[int, ...], most: int = 64) -> str:
    """Ranks as Python writes them, or the first few.

    >>> listed((3, 1)), listed(tuple(range(9, 0, -1)), most=8)
    ('[3, 1]', '[9, 8, 7, 6, ... 9 in all]')
    """
    if isinstance(ranks, range):
        return str(ranks)
    if len(ranks) <= most:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:4]))}, ... {len(ranks)} in all]"


def _whole(names: Sequence[str], layouts: Sequence[Layout]) -> Layout:
    """The axes flattened; `MeshError` that names two which share ranks, or one that stands twice."""
    if len(set(names)) < len(names):
        twice = max(names, key=names.count)
        raise MeshError(f"a mesh has each axis once; found '{twice}' twice in ({', '.join(names)})")
    try:
        return Layout.product(*layouts)
    except MeshError:
        for (one, layout), (two, other) in itertools.combinations(zip(names, layouts, strict=True), 2):
            if layout.overlaps(other):
                raise MeshError(
                    f"axes '{one}' ({layout}) and '{two}' ({other}) share ranks; a mesh has axes that don't overlap"
                ) from None
        raise MeshError(
            f"axes {', '.join(names)} can't be in one mesh, since their layouts have no common digits: "
            f"{', '.join(map(str, layouts))}"
        ) from None


def _behind(every: Sequence[Digit], layout: Layout) -> list[Digit] | None:
    """What is left of the digits after those of `layout`, or None where they don't begin with it."""
    left = list(every)
    for size, stride in layout:
        if not left or left[0][0] * left[0][1] != size * stride or left[0][0] % size:
            return None
        rest, low = left[0][0] // size, left[0][1]
        left[:1] = [(rest, low)] if rest > 1 else []
    return left
