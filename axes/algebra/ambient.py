"""The ambient mesh: what names mean where no mesh is passed.

>>> from axes.algebra.mesh import Mesh
>>> with Mesh("dp=2 tp=4") as mesh:
...     ambient_mesh() is mesh
True

Each thread has its own stack of them, since backward runs in threads of autograd's. This file knows
nothing of meshes but that they are pushed and popped: a mesh pushes itself in `with mesh:`. Beside it lie the
ambient rules for logical names.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axes.algebra.mesh import Mesh


class _Stack(threading.local):
    def __init__(self) -> None:
        self.meshes: list[Mesh] = []
        self.rules: list[Any] = []


stack = _Stack()
"""The meshes and the rules that blocks of this thread have entered, the innermost last."""


def ambient_mesh() -> Mesh | None:
    """The innermost mesh of this thread, or None.

    This, `push` and `pop` have another body in compiled graphs: see `axes.runtime.graphs`.
    """
    return stack.meshes[-1] if stack.meshes else None


def push(mesh: Mesh) -> None:
    """Makes `mesh` the ambient one until `pop`."""
    stack.meshes.append(mesh)


def pop() -> None:
    """Returns to the mesh that was ambient before."""
    stack.meshes.pop()
