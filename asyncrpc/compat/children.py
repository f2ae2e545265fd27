"""Installs the facade in multiprocessing's processes before the program's code runs.

A spawned process is a new interpreter.  It unpickles its preparation data, imports the
program's main module as they direct, and then unpickles the function to run.  The main
module's imports must find the facade, and only the preparation data come earlier
without a change to the started interpreter.  So we add an entry to them
(`multiprocessing.spawn.get_preparation_data`) that pickles as a call of `exec`:
unpickling it installs the facade.  The process's own children get it the same way.

What was rejected: a `sitecustomize` or a `.pth` file changes every interpreter of the
environment, other programs' too; another executable (`multiprocessing.set_executable`)
is seen by the program, and by its debugger and profiler; a variable of the environment
is not read in a process that does not import asyncrpc; an entry among the
arguments of `Process` comes after the main module has been imported.

The entry brings the parent's import path along, as the interpreter does not have it
yet, and last the place of asyncrpc, which the program's own path may lack (`python -m`
finds it in the working directory, and a script's path does not have that).  Preparation
sets the path right afterwards.

Forked processes inherit the facade; the processes of a fork server get the entry, too.
Newer Pythons let the server itself import the main module, which is too early: we
prevent that.  Not covered are interpreters that the program starts on its own
(`subprocess`), and libraries with a copy of multiprocessing (loky): start those with
`-m asyncrpc.compat`, or call `asyncrpc.compat.install()` in them.

Source: multiprocessing.spawn of Python 3.11 to 3.14 (`_main`, `prepare`).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from typing import Any, Final

import asyncrpc

_ENTRY: Final = "asyncrpc.compat"  # a key of the preparation data that is ignored
_ASYNCRPC_IN: Final = str(Path(asyncrpc.__file__).parents[1])
_FIRST: Final = """
import sys
sys.path = {path!r}
from asyncrpc.compat import install
install()
"""
# The fork server imports this by default.
_PRELOADED: Final = "__main__"


class Installation:
    """Installs the facade where it is unpickled."""

    def __init__(self, path: list[str]) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, dict[str, Any]]]:
        """Pickle as code: the new process cannot find our functions yet."""
        return exec, (_FIRST.format(path=self._path), {})


class Preparation:
    """Replaces `get_preparation_data`, and adds the entry to its result."""

    def __init__(self, original: Callable[[str], dict[str, Any]]) -> None:
        self.original = original

    def __call__(self, name: str) -> dict[str, Any]:
        """Return the preparation data of a process."""
        prepared = self.original(name)
        path = [*prepared["sys_path"], _ASYNCRPC_IN]
        return {_ENTRY: Installation(path), **prepared}


def cover() -> None:
    """Install the facade in processes that are started from now on."""
    if not isinstance(spawn.get_preparation_data, Preparation):
        _set_preparation(Preparation(spawn.get_preparation_data))
        multiprocessing.set_forkserver_preload([])


def uncover() -> None:
    """Start processes as before, without the facade."""
    if isinstance(spawn.get_preparation_data, Preparation):
        _set_preparation(spawn.get_preparation_data.original)
        multiprocessing.set_forkserver_preload([_PRELOADED])


def _set_preparation(function: Callable[[str], dict[str, Any]]) -> None:
    vars(spawn)["get_preparation_data"] = function
