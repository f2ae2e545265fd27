"""Starts a model process that outlives who starts it.

It is nobody's child: a web worker that is killed, or reloads, takes nothing along and
leaves nothing behind.  A small program is started, which starts the process in a
session of its own and ends at once.  So Ctrl-C in a terminal does not reach the
process, and the system takes its exit status.

It inherits the output of the web worker and no other descriptor, but for the lock of
its slot: a listening socket of the web server, say, would keep the port in use.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from typing import Final

from asyncrpc.errors import ProcessFailedError
from asyncrpc.inspection.run_note import without_entry
from asyncrpc.serving.model_host.order import HostOrder
from asyncrpc.serving.model_host.slot import ModelSlot

# Becomes the model process, in a session of its own, as the child of nobody.
_LEAVE: Final = """\
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
os.execv(sys.argv[1], sys.argv[1:])
"""
# The path comes first: without it asyncrpc may not be found.
_PROGRAM: Final = """\
import pickle, sys
told = sys.stdin.buffer
sys.path[:] = pickle.load(told)
from asyncrpc.serving.model_host.process import main
main(told, int(sys.argv[1]))
"""


def start_unless_held(slot: ModelSlot, order: HostOrder) -> bool:
    """Start the process of a slot, unless one runs or is being started there.

    It blocks this thread for some 20 ms.

    Returns:
        Whether this call has started it.

    Raises:
        ProcessFailedError: no process could be started.
    """
    lock = None
    try:
        lock = slot.try_lock()
        if lock is None:
            return False
        _start(lock, order)
    except OSError as error:
        raise ProcessFailedError(
            f"the process of model {order.name!r} could not be started: {error}",
            rank=0,
            exit_code=None,
            remote_traceback="",
        ) from error
    finally:
        if lock is not None:
            os.close(lock)  # the process has it, and keeps it locked
    return True


def _start(lock: int, order: HostOrder) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(lock), order.name, order.function]
    process = subprocess.Popen(  # noqa: S603  (what this program runs, it may run)
        [sys.executable, "-I", "-S", "-c", _LEAVE, *command],
        stdin=subprocess.PIPE,
        pass_fds=[lock],
        env=without_entry(),  # web workers of other runs may use it, too
    )
    assert process.stdin is not None
    # A pipe holds 64 KiB, so this does not wait for the imports of the process.  One
    # that has died has left the lock, which those who wait will see.
    with contextlib.suppress(BrokenPipeError), process:
        process.stdin.write(pickle.dumps(list(sys.path)))
        process.stdin.write(pickle.dumps(order))
