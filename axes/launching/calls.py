"""Calls and how they end, as bytes between processes: by value, and with errors that say what to do.

A function is sent as its module and name, a tensor as its numbers. So the receiver needs the module, and nothing (no
shared memory, no descriptor) is left over when sender or receiver ends. What has no name that the receiver could find
it by (a lambda, a function in a function, in a notebook or another interactive session) goes by `cloudpickle`, where
that is installed.

>>> function, arguments = pickle.loads(packed("divmod", divmod, (7, 2)))
>>> function(*arguments)
(3, 1)
>>> packed("divmod", divmod, ((i for i in "ab"),))    # doctest: +ELLIPSIS
Traceback (most recent call last):
axes.algebra.errors.AxesError: argument 0 of divmod, a generator, can't be sent to other processes: ...
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import pickle
import sys
import types
from typing import Any, NamedTuple

from axes.algebra.errors import AxesError


class End(NamedTuple):
    """How a call ended on a rank: in words, with its result or exception as bytes, and with the exception's traceback.

    `failed_at`: a time, by which the first failure is found.
    """

    how: str
    value: bytes | None = None
    traceback: str = ""
    failed_at: float = math.inf


def script() -> dict[str, str]:
    """This program's own file, as `multiprocessing.spawn.prepare` runs it again; nothing in an interactive session."""
    main = sys.modules["__main__"]
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if path is None or not os.path.isfile(path):
        return {}
    return {"init_main_from_name": spec.name} if spec else {"init_main_from_path": os.path.abspath(path)}


def packed(name: str, function: object, arguments: tuple[object, ...]) -> bytes:
    """The call of a function as bytes. `AxesError` where a part of it can't be sent."""
    try:
        return dumps((function, arguments))
    except Exception:  # whatever its own code raises: which part is it?
        sendable(
            name,
            function,
            "Define it with `def` at the top level of a module, a file (not a lambda, not inside another function), "
            "and pass what it needs as arguments, or install cloudpickle",
        )
        for i, value in enumerate(arguments):
            kind = type(value).__qualname__
            sendable(f"argument {i} of {name}, a {kind},", value, "Send plain data, and make the rest there")
        raise


def sendable(part: str, value: object, advice: str) -> bytes:
    """A part of a call as bytes, or its result; `AxesError` where it can't be sent."""
    try:
        return dumps(value)
    except Exception as error:
        raise AxesError(f"{part} can't be sent to other processes: {error}. {advice}") from error


def dumps(value: object) -> bytes:
    """`value` as bytes, tensors by value; by cloudpickle where only that can, and is installed."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:
        with contextlib.suppress(Exception):  # not there, or can't do it either
            return bytes(importlib.import_module("cloudpickle").dumps(value, pickle.HIGHEST_PROTOCOL))
        raise
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Refuses what only an interactive session defines; leaves the rest to pickle."""
        if isinstance(value, type | types.FunctionType) and value.__module__ == "__main__" and not script():
            raise pickle.PicklingError(f"{value.__qualname__} is defined in an interactive session")
        return NotImplemented
