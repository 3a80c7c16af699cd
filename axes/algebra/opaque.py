"""The types of what a running job gives: the algebra hands such values on, and never looks inside.

The algebra knows no torch, so here each is anything at all. Type checkers read `opaque.pyi` beside this
file instead, where they are torch's own classes: to a user's checker `mesh.device_mesh` is a `DeviceMesh`.
That stub is the one place where a type of the algebra meets torch, and no program ever runs it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

DeviceMesh: TypeAlias = Any
Dtype: TypeAlias = Any
Placement: TypeAlias = Any
ProcessGroup: TypeAlias = Any
