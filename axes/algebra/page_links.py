"""Links of pages: some pages of one pool that are some pages of another, by their numbers.

A cache of keys and values is a pool of pages, `page@dp slot h@tp d`. What moves are the pages of a list, to other
numbers of another pool, which has a size, axes and ranks of its own. The list is planned as a tensor in place of the
pool. Its order is free: sorted by who has a page and who gets it, what a rank has of the list is a few stretches,
whatever numbers are in it.

>>> from axes.algebra.mesh import Mesh
>>> one, two = Mesh("dp=2").sharding("page@dp d"), Mesh("tp=2").sharding("page d@tp")
>>> link = PageLink.of(0, (one, two), ((4, 3), (8, 3)), ((3, 0, 2), (5, 6, 7)))
>>> link.pages, link.runs, link.extents
(((0, 3, 2), (6, 5, 7)), ((((0, 1),), ((1, 3),)), (((0, 3),),)), (3, 3))
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from axes.algebra.chunks import Runs, Tile, boxes_within, count
from axes.algebra.errors import ShardingError, SizeError, shortened, shown
from axes.algebra.planning.exchange import Pieces, pieces_of
from axes.algebra.sharding import Sharding, Slots
from axes.algebra.sizes import tuple_of, whole_numbers

Shape = tuple[int, ...]
Lists = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of pages of the source, and of the target, one by one."""


@dataclass(frozen=True)
class PageLink:
    """Pages of two tensors that have one dim of pages.

    dim: its number. shapes: of both whole tensors. runs: for each piece of the dim, on both sides, its stretches of the
    list. pages: the list, in the order in which it is planned; who sends what to whom doesn't depend on it.
    """

    dim: int
    shapes: tuple[Shape, Shape]
    runs: tuple[tuple[Runs, ...], tuple[Runs, ...]]
    pages: Lists = field(compare=False)

    boxes = staticmethod(boxes_within)
    """Boxes are of what a rank has of the list, page after page, and of its tile along the other dims."""

    @staticmethod
    def of(dim: int, ends: tuple[Sharding, Sharding], shapes: tuple[Shape, Shape], pages: Lists) -> PageLink:
        """The link of a list, between tensors that lie so."""
        dims = ends[0].dims[dim], ends[1].dims[dim]
        return sorted_link(dim, dims, (shapes[0][dim], shapes[1][dim]), pages).on(shapes)

    def on(self, shapes: tuple[Shape, Shape]) -> PageLink:
        """The same of tensors of other shapes, whose pages are as many."""
        return replace(self, shapes=shapes)

    @property
    def inverse(self) -> PageLink:
        """The way back."""
        (here, there), (source, target), (one, two) = self.shapes, self.runs, self.pages
        return PageLink(self.dim, (there, here), (target, source), (two, one))

    @property
    def extents(self) -> Shape:
        """The shape of the list as a tensor."""
        shape = self.shapes[0]
        return (*shape[: self.dim], len(self.pages[0]), *shape[self.dim + 1 :])

    @property
    def offsets(self) -> tuple[Shape, Shape]:
        """Where both begin."""
        return (0,) * len(self.shapes[0]), (0,) * len(self.shapes[1])

    def pieces(self, side: int, sharding: Sharding) -> tuple[Pieces, ...]:
        """What a sharding cuts the list into."""
        cut = list(map(pieces_of, sharding.dims, sharding.extents(self.shapes[side])))
        cut[self.dim] = Pieces(cut[self.dim].layout, self.runs[side])
        return tuple(cut)

    def largest(self, side: int, sharding: Sharding) -> int:
        """The most elements of the list that a rank has."""
        shape = list(self.shapes[side])
        shape[self.dim] = sharding.dims[self.dim].pieces  # one page each
        return max(map(count, self.runs[side])) * sharding.largest_tile(shape)

    def like(self, *ends: Sharding) -> PageLink:
        """Lists are not alike."""
        return self

    def tile(self, side: int) -> Tile:
        """What is written may be anywhere."""
        return tuple([((0, size),) for size in self.shapes[side]])

    def index(self, side: int, sharding: Sharding, rank: int) -> list[int]:
        """The pages of the list that a rank has, as numbers in its tile, in the order of the list."""
        position = sharding.universe.position(rank)
        assert position is not None, "what is exchanged is of a tile that the rank has"
        pool = pieces_of(sharding.dims[self.dim], (self.shapes[side][self.dim],))
        number = pool.layout.coordinate(position)
        first, pages = pool.runs[number][0][0], self.pages[side]
        return [page - first for start, stop in self.runs[side][number] for page in pages[start:stop]]

    def __str__(self) -> str:
        pools = " -> ".join(str(shape[self.dim]) for shape in self.shapes)
        return f"{len(self.pages[0])} pages, dim {self.dim}, {pools}"


def sorted_link(dim: int, dims: tuple[Slots, Slots], counts: tuple[int, int], pages: Lists) -> PageLink:
    """The link of a list between pools of so many pages, with the pages of each piece together."""
    owners = [_owners(pieces_of(pool, (size,)), each) for pool, size, each in zip(dims, counts, pages, strict=True)]
    order = sorted(range(len(pages[0])), key=list(zip(*owners, strict=True)).__getitem__)
    sides = []
    for pool, owner in zip(dims, owners, strict=True):
        found: list[list[tuple[int, int]]] = [[] for _ in range(pool.pieces)]
        for at, number in enumerate(order):
            runs = found[owner[number]]
            if runs and runs[-1][1] == at:
                runs[-1] = (runs[-1][0], at + 1)
            else:
                runs.append((at, at + 1))
        sides.append(tuple([tuple(runs) for runs in found]))
    one, two = (tuple([each[number] for number in order]) for each in pages)
    return PageLink(dim, ((counts[0],), (counts[1],)), (sides[0], sides[1]), (one, two))


def _owners(pool: Pieces, pages: Sequence[int]) -> list[int]:
    """Which piece of a pool each page is in."""
    ends = [stop for ((_, stop),) in pool.runs]
    return [bisect_right(ends, page) for page in pages]


def page_dim(name: str, end: Sharding) -> int:
    """The number of the dim of pages; `ShardingError` where a tensor has none."""
    dims = [at for at in range(end.ndim) if end.names_of(at) == (name,)]
    if len(dims) != 1:
        raise ShardingError(
            f"pages= says that {shown(name)} is a dim of pages; '{end}' has no such dim outside of groups"
        )
    return dims[0]


def check_page_dims(at: int, source: Sharding, target: Sharding, tensor: str) -> None:
    """`ShardingError` where the dim of pages of a source isn't a dim like it of the target."""
    (name,) = source.names_of(at)
    if target.names_of(at) != (name,):
        raise ShardingError(
            f"'{name}' is dim {at} of {shortened(tensor)}, '{source}'; of the target, '{target}', it isn't"
        )


def checked_pages(given: object, counts: tuple[int, int]) -> Lists:
    """Two lists of numbers of pages, as many; `ShardingError` for what isn't."""
    both = tuple_of(given)
    if both is None or len(both) != 2:
        raise ShardingError(
            f"pages= are two lists, the pages of the sources and those of the targets; found {shown(given)}"
        )
    sources = checked_list(both[0], counts[0], "sources")
    return sources, checked_list(both[1], counts[1], "targets", len(sources))


def checked_list(given: object, pool: int, side: str, like: int | None = None) -> tuple[int, ...]:
    """Numbers of pages of a pool; those of targets are all different."""
    found = whole_numbers(given)
    if found is None:
        raise ShardingError(f"the pages of the {side} are whole numbers; found {shown(given)}")
    if found and not 0 <= min(found) <= max(found) < pool:
        wrong = next(page for page in found if not 0 <= page < pool)
        raise ShardingError(f"the {side} have {pool} pages, from 0 on; found {wrong}")
    if side == "targets" and len({*found}) < len(found):
        twice = next(page for page, times in Counter(found).items() if times > 1)
        raise ShardingError(f"page {twice} of the targets is in the list twice; each is written once")
    if like is not None and len(found) != like:
        raise ShardingError(f"pages= are as many of the sources as of the targets; found {like} and {len(found)}")
    return found


def checked_pool(given: object) -> tuple[str, int | None]:
    """The name of the dim of pages, and how many the targets have where that is said."""
    if isinstance(given, str):
        return given, None
    both = tuple_of(given)
    if both is None or len(both) != 2 or not isinstance(both[0], str) or whole_numbers(both[1:]) is None or both[1] < 0:
        raise SizeError(
            f"pages= is the name of a dim, or a name and how many pages the targets have; found {shown(given)}"
        )
    return both[0], whole_numbers(both[1:])[0]  # type: ignore[index]
