"""The ambient mesh: what names mean where no mesh is passed.

>>> from axes.algebra.mesh import Mesh
>>> with Mesh("dp=2 tp=4") as mesh:
...     ambient_mesh() is mesh
True

Each thread has its own, since backward runs in threads of autograd's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from axes.algebra.errors import MeshError

if TYPE_CHECKING:
    from axes.algebra.mesh import Mesh


class _Stack(threading.local):
    def __init__(self) -> None:
        self.meshes: list[Mesh] = []


_stack = _Stack()


def ambient_mesh() -> Mesh | None:
    """The innermost mesh of this thread, or None.

    This, `push` and `pop` have another body in compiled graphs: see `axes.runtime.graphs`.
    """
    return _stack.meshes[-1] if _stack.meshes else None


def ambient_outside() -> Mesh | None:
    """The innermost mesh of this thread where a graph is compiled, without those that the graph itself enters."""
    return _stack.meshes[-1] if _stack.meshes else None


def push(mesh: Mesh) -> None:
    """Makes `mesh` the ambient one until `pop`."""
    _stack.meshes.append(mesh)


def pop() -> None:
    """Returns to the mesh that was ambient before."""
    _stack.meshes.pop()


@contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Makes `mesh` the ambient mesh of a block: names in expressions are looked up in it.

    As JAX's `jax.set_mesh`. Also written `with mesh:`, which `torch.compile` doesn't know how to enter.

    >>> from axes.algebra.mesh import Mesh
    >>> with use_mesh(Mesh("dp=2 tp=4")):
    ...     ambient_mesh().size
    8
    """
    push(checked_mesh(mesh))
    try:
        yield mesh
    finally:
        pop()


def checked_mesh(mesh: Mesh) -> Mesh:
    """`mesh`; `MeshError` for what is none."""
    from axes.algebra.mesh import Mesh

    if not isinstance(mesh, Mesh):
        raise MeshError(f"a mesh is an axes mesh, made by axes.init_mesh; found {type(mesh).__name__}: {mesh!r:.60}")
    return mesh


def required_mesh(mesh: Mesh | None, what: str) -> Mesh:
    """`mesh`, else the ambient one; `MeshError` that says so where there is neither."""
    found = mesh if mesh is not None else ambient_mesh()
    if found is None:
        raise MeshError(f"{what} needs a mesh; pass mesh=... or write it inside `with mesh:`")
    return checked_mesh(found)
