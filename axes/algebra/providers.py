"""Providers: where the algebra's values are given what lies above them: a running job, and what draws them.

A `Mesh` is pure algebra, yet `mesh.device_mesh` and `mesh.axis("tp").group` should work, and a notebook shows its
picture. `axes/__init__.py` says which module provides them, and it is imported at first need. The other floors of the
core reach in the same way what is above them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from axes.algebra.errors import MeshError

_modules: Mapping[str, str] = MappingProxyType({})  # replaced as a whole, by `provide`


def provide(**modules: str) -> None:
    """Says which module provides what; called once, by the package's `__init__`."""
    global _modules
    _modules = modules


def module(role: str, wanted: str) -> Any:
    """The module that provides something, for `wanted`; `MeshError` where the algebra is used without it."""
    if role not in _modules:
        raise MeshError(f"{wanted} needs the {role} of axes; import axes, not axes.algebra alone")
    return importlib.import_module(_modules[role])


def picture_of(value: object) -> Any:
    """The picture of a value: `svg()`, `html()`, `_repr_html_()`."""
    return module("pictures", "a picture").show(value)


class Pictured:
    """A value of which a notebook shows the picture; its text where the algebra is used alone."""

    def _repr_html_(self) -> str | None:
        return picture_of(self)._repr_html_() if "pictures" in _modules else None
