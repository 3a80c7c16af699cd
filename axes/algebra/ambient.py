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


_stack = _Stack()


def ambient_mesh() -> Mesh | None:
    """The innermost mesh of this thread, or None.

    This, `push` and `pop` have another body in compiled graphs: see `axes.runtime.graphs`.
    """
    meshes = _stack.meshes
    return meshes[-1] if meshes else None


def ambient_outside() -> Mesh | None:
    """The innermost mesh of this thread where a graph is compiled, without those that the graph itself enters."""
    return _stack.meshes[-1] if _stack.meshes else None


def push(mesh: Mesh) -> None:
    """Makes `mesh` the ambient one until `pop`."""
    _stack.meshes.append(mesh)


def pop() -> None:
    """Returns to the mesh that was ambient before."""
    _stack.meshes.pop()


def innermost_rules() -> Any:
    """The innermost rules of this thread, or None."""
    return _stack.rules[-1] if _stack.rules else None


def push_rules(rules: Any) -> None:
    """Makes `rules` the ambient ones until `pop_rules`."""
    _stack.rules.append(rules)


def pop_rules() -> None:
    """Returns to the rules that were ambient before."""
    _stack.rules.pop()
