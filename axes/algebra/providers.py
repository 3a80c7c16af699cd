"""Providers: where the algebra's values are given what only a running job has, and what draws them.

A `Mesh` is pure algebra, yet `mesh.device_mesh` and `mesh.axis("tp").group` should work. The
runtime, which may import the algebra but not the other way round, provides one object with the
methods of `Runtime`; `axes/__init__.py` says where to find it, and it is imported at first need. So
it is with pictures (`_repr_html_`), which the top layer draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from axes.algebra.errors import MeshError
from axes.algebra.layout import Layout
from axes.algebra.opaque import DeviceMesh, Placement, ProcessGroup

if TYPE_CHECKING:
    from axes.algebra.mesh import Mesh
    from axes.algebra.sharding import Sharding


class Runtime(Protocol):
    """What `axes.runtime` provides."""

    def rank(self) -> int:
        """The global rank of this process."""

    def group(self, mesh: Mesh, layout: Layout, name: str) -> ProcessGroup:
        """The process group of this process along `layout`."""

    def device_mesh(self, mesh: Mesh) -> DeviceMesh:
        """The torch `DeviceMesh` of the mesh's axes."""

    def create_groups(self, mesh: Mesh, names: Sequence[str]) -> None:
        """Makes the groups of these names now, in this order on every rank."""

    def abort(self, mesh: Mesh) -> None:
        """Ends the groups among the mesh's ranks without the other ranks."""

    def from_device_mesh(self, device_mesh: DeviceMesh) -> Mesh:
        """The mesh that adopts a torch `DeviceMesh`."""

    def from_placements(
        self, mesh: Mesh, placements: tuple[Placement, ...], ndim: int, shape: Sequence[int] | None
    ) -> Sharding:
        """The sharding of DTensor placements on the mesh's axes, of a tensor of this shape where there is one."""

    def placements(self, sharding: Sharding) -> tuple[Placement, ...]:
        """The DTensor placements of a sharding on its mesh's axes."""

    def carry_out(
        self, move: Any, tensors: Mapping[str, Any], into: Mapping[str, Any] | None, pages: Any
    ) -> dict[str, Any]:
        """Carry a `Transfer` out with this rank's tensors."""


class Shown(Protocol):
    """A picture of a value."""

    def svg(self) -> str:
        """The picture as SVG."""

    def html(self) -> str:
        """The picture as a page of its own."""

    def _repr_html_(self) -> str:
        """The picture as a part of a page, as notebooks ask for it."""


class Pictures(Protocol):
    """What `axes.show` provides."""

    def drawn(self, value: object) -> Shown:
        """The picture of a value."""


_provider: Callable[[], Runtime] | None = None
_pictures: Callable[[], Pictures] | None = None


def provide(runtime: Callable[[], Runtime], pictures: Callable[[], Pictures]) -> None:
    """Says how to get the runtime and the pictures; called once, by the package's `__init__`."""
    global _provider, _pictures
    _provider, _pictures = runtime, pictures


def picture_of(value: object) -> Shown:
    """The picture of a value; `MeshError` where the algebra is used without what draws."""
    if _pictures is None:
        raise MeshError("a picture needs axes.show; import axes, not axes.algebra alone")
    return _pictures().drawn(value)


def html_of(value: object) -> str | None:
    """A picture of a value as a part of a page; None where the algebra is used alone, so that its text is shown."""
    return None if _pictures is None else picture_of(value)._repr_html_()


def runtime(wanted: str) -> Runtime:
    """The runtime, for `wanted`; `MeshError` where the algebra is used without one."""
    if _provider is None:
        raise MeshError(f"{wanted} needs the runtime; import axes, not axes.algebra alone")
    return _provider()
