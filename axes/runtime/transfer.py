"""Calls and results as bytes between processes: by value, and with errors that say what to do.

A function is sent as its module and name, a tensor as its numbers. So the receiver needs the
module, and nothing (no shared memory, no descriptor) is left over when sender or receiver ends.
What has no name that the receiver could find it by (a lambda, a function in a function, in a
notebook or another interactive session) goes by `cloudpickle`, where that is installed.

>>> function, arguments = loads(Call.of(divmod, (7, 2)).data)
>>> function(*arguments)
(3, 1)
>>> Call.of(divmod, ((i for i in "ab"),))    # doctest: +ELLIPSIS
Traceback (most recent call last):
axes.algebra.errors.AxesError: argument 0 of divmod, a generator, can't be sent to other processes: ...

What a script defines is in the module `__main__`. The receiver runs that script once more under the
name `__mp_main__`, as `multiprocessing` does, and only where something of it is asked for.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import runpy
import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from axes.algebra.errors import AxesError

_MAIN = ("__main__", "__mp_main__")
_loading: ContextVar[bool] = ContextVar("_loading", default=False)


@dataclass(frozen=True)
class Main:
    """The script that a program runs as: a module's name (`python -m`), or a path."""

    name: str
    is_module: bool


def main_of_this_process() -> Main | None:
    """The script that others can run again; None in an interactive session."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    if spec is not None and path is not None:
        return Main(spec.name, True)
    if path is not None and os.path.isfile(path):
        return Main(os.path.abspath(path), False)
    return None


@dataclass(frozen=True)
class Call:
    """A function and its arguments as bytes, and the function's name for messages."""

    name: str
    data: bytes

    @classmethod
    def of(cls, function: Callable[..., object], arguments: tuple[object, ...]) -> Call:
        """`function(*arguments)`. `AxesError` where one of them can't be sent."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            return cls(name, dumps((function, arguments)))
        except AxesError:
            raise
        except Exception as error:
            raise AxesError(_complaint(name, function, arguments, error)) from error


def _complaint(name: str, function: object, arguments: tuple[object, ...], error: Exception) -> str:
    if not _can_be_sent(function):
        return (
            f"{name} can't be sent to other processes: they find a function by its name in its "
            f"module ({error}). Define it with `def` at the top level of a module (not a lambda, "
            f"not inside another function) and pass what it needs as arguments, or install cloudpickle"
        )
    wrong = next(i for i, value in enumerate(arguments) if not _can_be_sent(value))
    return (
        f"argument {wrong} of {name}, a {type(arguments[wrong]).__qualname__}, can't be sent to "
        f"other processes: {error}. Send plain data, and make the rest there"
    )


def _can_be_sent(value: object) -> bool:
    try:
        dumps(value)
    except Exception:  # whatever its own code raises
        return False
    return True


def loads(data: bytes | bytearray, main: Main | None = None) -> Any:
    """What `data` holds. `main` is run first where something of it is in there."""
    return _Unpickler(io.BytesIO(data), main).load()


def loading_main() -> bool:
    """Whether this process is just running its requester's script to find something in it."""
    return _loading.get()


def dumps(value: object) -> bytes:
    """`value` as bytes, tensors by value; by cloudpickle where only that can, and is installed."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # whatever its own code raises
        try:
            return importlib.import_module("cloudpickle").dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception:  # not there, or can't do it either
            pass
        raise
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Refuses what only an interactive session defines; leaves the rest to pickle."""
        named = isinstance(value, type | types.FunctionType) and value.__module__ in _MAIN
        if named and main_of_this_process() is None:
            raise AxesError(
                f"{value.__qualname__} is defined in an interactive session, where no other "
                f"process can find it: write it into a module (a file) and import it from there, "
                f"or install cloudpickle"
            )
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, main: Main | None):
        super().__init__(file)
        self._main = main

    def find_class(self, module: str, name: str) -> Any:
        if module not in _MAIN:
            return super().find_class(module, name)
        if self._main is not None:
            _run_main(self._main)
        try:
            return super().find_class("__main__", name)
        except AttributeError as error:
            raise AxesError(
                f"{name} isn't there when another process runs the script: define it at the top "
                f'level, not under `if __name__ == "__main__":`'
            ) from error


@functools.lru_cache(maxsize=1)
def _run_main(main: Main) -> None:
    """Runs the requester's script, guard closed, and makes it this process's `__main__`."""
    token = _loading.set(True)
    try:
        if main.is_module:
            found = runpy.run_module(main.name, run_name=_MAIN[1], alter_sys=True)
        else:
            found = runpy.run_path(main.name, run_name=_MAIN[1])
    finally:
        _loading.reset(token)
    module = types.ModuleType(_MAIN[1])
    module.__dict__.update(found)
    sys.modules.update(dict.fromkeys(_MAIN, module))
