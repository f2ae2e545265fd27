"""Starts a model process that outlives the web worker that starts it.

It is not a child of the web worker, which may be killed or reloaded.  A small program
is started, which starts the process in a new session and ends at once.  So Ctrl-C in a
terminal does not reach the process, and the system collects its exit status.

It inherits the output of the web worker, the lock of its slot, and no other descriptor:
a listening socket of the web server, for example, would keep the port in use.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from typing import Final

from asyncrpc.errors import ProcessFailedError
from asyncrpc.serving.model_host.order import HostOrder
from asyncrpc.serving.model_host.slot import ModelSlot
from asyncrpc.tools.inspection.run_note import without_entry

# Becomes the model process, in a new session, as an orphan.
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

    Blocks this thread for some 20 ms.
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
            os.close(lock)  # the process has its copy, and keeps it locked
    return True


def _start(lock: int, order: HostOrder) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(lock), order.name, order.function]
    process = subprocess.Popen(  # noqa: S603  (what this program runs, it may run)
        [sys.executable, "-I", "-S", "-c", _LEAVE, *command],
        stdin=subprocess.PIPE,
        pass_fds=[lock],
        env=without_entry(),  # web workers of other runs may use it as well
    )
    assert process.stdin is not None
    # A pipe holds 64 KiB, so this does not wait for the imports of the process.  If the
    # process has died, its lock is free, which waiting web workers will see.
    with contextlib.suppress(BrokenPipeError), process:
        process.stdin.write(pickle.dumps(list(sys.path)))
        process.stdin.write(pickle.dumps(order))
