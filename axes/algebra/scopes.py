"""Where names are looked up: the mesh that a caller passes, else the ambient one.

>>> from axes.algebra.mesh import Mesh
>>> with use_mesh(Mesh("dp=2 tp=4")):
...     required_mesh(None, "shard").size
8
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from axes.algebra.ambient import ambient_mesh, pop, push
from axes.algebra.errors import MeshError, shown
from axes.algebra.mesh import Mesh


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
