"""Providers: where the algebra's values are given what only a running job has, and what draws them.

A `Mesh` is pure algebra, yet `mesh.device_mesh` and `mesh.axis("tp").group` should work. The
runtime, which may import the algebra but not the other way round, provides one object with the
methods of `Runtime`; `axes/__init__.py` says where to find it, and it is imported at first need. So
it is with pictures (`_repr_html_`), which the top layer draws, and with many tensors that are resharded
at once, which are a transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from axes.algebra.errors import MeshError

Runtime: TypeAlias = Any
"""The module `axes.runtime.bridge`: what it has is what the algebra asks of a running job."""

Pictures: TypeAlias = Any
"""The module `axes.show.show`, whose `drawn` gives the picture of a value: `svg()`, `html()`, `_repr_html_()`."""

Transfers: TypeAlias = Any
"""The module `axes.transfers.transfer_runs`, which moves many tensors at once."""

_provider: Callable[[], Runtime] | None = None
_pictures: Callable[[], Pictures] | None = None
_transfers: Callable[[], Transfers] | None = None


def provide(
    runtime: Callable[[], Runtime], pictures: Callable[[], Pictures], transfers: Callable[[], Transfers]
) -> None:
    """Says how to get the runtime, the pictures and the transfers; called once, by the package's `__init__`."""
    global _provider, _pictures, _transfers
    _provider, _pictures, _transfers = runtime, pictures, transfers


def transfers() -> Transfers:
    """What moves many tensors at once; `MeshError` where the algebra is used without it."""
    if _transfers is None:
        raise MeshError("many tensors at once need axes.transfers; import axes, not axes.algebra alone")
    return _transfers()


def picture_of(value: object) -> Any:
    """The picture of a value; `MeshError` where the algebra is used without what draws."""
    if _pictures is None:
        raise MeshError("a picture needs axes.show; import axes, not axes.algebra alone")
    return _pictures().drawn(value)


class Pictured:
    """A value of which a notebook shows the picture; its text where the algebra is used alone."""

    def _repr_html_(self) -> str | None:
        return None if _pictures is None else picture_of(self)._repr_html_()  # type: ignore[no-any-return]


def runtime(wanted: str) -> Runtime:
    """The runtime, for `wanted`; `MeshError` where the algebra is used without one."""
    if _provider is None:
        raise MeshError(f"{wanted} needs the runtime; import axes, not axes.algebra alone")
    return _provider()
