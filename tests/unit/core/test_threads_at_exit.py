"""Threads that are started while a program ends.  CPython 3.12 itself starts none."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from asyncrpc.core.loop.threads import start_thread

PROGRAM = """
import atexit, threading
from asyncrpc.core.loop.threads import start_thread

def work(ended):
    print(threading.current_thread().name, flush=True)
    ended.set()

def at_exit():
    for name in ("first", "second"):
        ended = threading.Event()
        made = threading.Thread(target=work, args=(ended,), name=name, daemon=True)
        start_thread(made)
        ended.wait()

atexit.register(at_exit)
"""


def test_thread_starts_during_atexit_functions() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("first\nsecond\n", "", 0)


def test_refused_thread_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread(threading.Thread(daemon=True))
