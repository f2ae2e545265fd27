"""No call on an event loop blocks it: asyncrpc's own calls, in every test's process.

Blockbuster wraps what blocks (files, sockets, `time.sleep`).  Of what is called while a
loop runs, it counts here if asyncrpc asked for it: the innermost frame that is of
asyncrpc or of the tests is asyncrpc's.  `ALLOWED` lists where it may, and why.

Such a call goes on, so that nothing else changes, and fails its test at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest
from blockbuster import BlockBuster

_REPOSITORY: Final = Path(__file__).parents[1]
_OURS: Final = f"{_REPOSITORY / 'asyncrpc'}/"
_KIT: Final = f"{_REPOSITORY / 'asyncrpc' / 'testing'}/"
_TESTS: Final = f"{_REPOSITORY / 'tests'}/"

# Functions of asyncrpc, by file, that may make the call; each with the reason.
_ONCE: Final = "once in a worker's life, at its start or end, on the host's own files"
_KERNEL: Final = "answered by the kernel from memory; no disk has a part in it"
_INSTALLED: Final = "sees what is installed, once a process"
_PROCESS: Final = "starts a process, for which its caller waits"
_MODULE: Final = "once after an import or a reload, which has read the same file"
ALLOWED: Final[Mapping[str, Mapping[str, str]]] = {
    "clusters/code/folders.py": {"at": "sees whether a path is there, once a cluster"},
    "clusters/code/sender.py": {"check": _MODULE, "_path_of": _MODULE},
    "clusters/shown.py": {"_memory_of": _KERNEL},
    "tools/inspection/summarizing.py": {"resident_bytes": _KERNEL},
    "core/multiprocessing/launcher.py": {
        "_held_interrupts": _PROCESS,
        "_start": _PROCESS,
    },
    "clusters/remote/command.py": {"open_command": _PROCESS},
    "core/devices/pjrt.py": {"has_tpu": _INSTALLED, "set_up": _INSTALLED},
    "core/links/heartbeat.py": {"__init__": _KERNEL},
    "core/links/routes.py": {"default_addresses": _KERNEL},
    "core/links/sidecar_process.py": {"_spawn": _PROCESS},
    "core/host/run_entry.py": {  # of `launch`
        "__init__": _PROCESS,
        "_locked": _PROCESS,
        "_named": _PROCESS,
        "record_of": _PROCESS,
    },
    "core/host/run_places.py": {
        "make_place": _PROCESS,
        "trouble_with": _PROCESS,
        "write_own": _PROCESS,
    },
    "core/host/socket_directory.py": {
        "__init__": _ONCE,
        "_locked": _ONCE,
        "_remove": _ONCE,
        "_remove_if_dead": _ONCE,
        "_sweep": _ONCE,
    },
    "core/payloads/loans.py": {"_on_readable": "the loop says that it can be read"},
    "serving/asgi/middleware.py": {"_answer": "calls the application, a framework's"},
    "core/transport/interfaces.py": {"_default_sources": _KERNEL, "_ipv6": _KERNEL},
    "core/transport/sockets.py": {
        "close_servers": _ONCE
    },  # asyncio's own, from 3.13 on
    "core/transport/tls.py": {"_first_certificate": _ONCE},
    "core/transport/uds.py": {
        "_bind": _ONCE,
        "_open_private": _ONCE,
        "_remove_stale": _ONCE,
        "listen": _ONCE,  # likewise
        "remove_own": _ONCE,
    },
    "core/sidecar/pulse.py": {
        "pid_namespace": _KERNEL,
        "read_of": _KERNEL,
        "stat_of": _KERNEL,
    },
}

# A lock is held for microseconds, and whether another thread has it just then is
# chance: a test would fail now and then.
_NOT_WATCHED: Final = ("threading.Lock.",)
# What is called through these: an import reads files once, a traceback looks at files
# that it has read once, and where logs go is not ours.
_OF_OTHERS: Final = (
    "importlib._bootstrap>",
    "/linecache.py",
    "logging/__init__.py",
    "coverage/control.py",
    "coverage/inorout.py",
)

blocking_calls: Final[list[str]] = []  # of the present test: what was called, and where


def note(function: str) -> None:
    """Note a call that blocks if it is asyncrpc's own, made on a loop, not allowed."""
    frame: FrameType | None = sys._getframe(3)  # noqa: SLF001  (blockbuster's caller)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path.startswith((_KIT, _TESTS)) or path.endswith(_OF_OTHERS):
            return
        if path.startswith(_OURS):
            file = path.removeprefix(_OURS)
            if name not in ALLOWED.get(file, {}):
                blocking_calls.append(
                    f"{function} in asyncrpc/{file}:{frame.f_lineno}, {name}"
                )
            return
        frame = frame.f_back


def watching() -> BlockBuster:
    """Return what notes asyncrpc's blocking calls, once it is activated."""
    watch = BlockBuster()
    for name, function in list(watch.functions.items()):
        if name.startswith(_NOT_WATCHED):
            del watch.functions[name]
        else:
            function.can_block_predicate = _noting(name, function.can_block_predicate)
    return watch


def _noting(name: str, is_quick: Callable[..., bool]) -> Callable[..., bool]:
    """Return a predicate that lets every call pass, and notes those that block."""

    def passes(*args: Any, **named: Any) -> bool:
        if not is_quick(*args, **named):
            note(name)
        return True

    return passes


# --- the plugin ----------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def watched_calls() -> Iterator[None]:
    """Wrap what blocks, for all tests of the process."""
    watch = watching()
    watch.activate()
    yield
    watch.deactivate()


@pytest.fixture(autouse=True)
def nothing_blocks(watched_calls: None) -> Iterator[None]:
    """Fail a test in which asyncrpc has blocked an event loop."""
    blocking_calls.clear()
    yield
    assert not blocking_calls, (
        f"blocking calls on an event loop: {sorted(set(blocking_calls))}"
    )
