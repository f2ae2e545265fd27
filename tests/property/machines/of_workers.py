"""The life of a worker."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from asyncrpc.core import lifecycle
from asyncrpc.errors import NotStartedError
from tests.property.machines.spec import Machine, guards
from tests.property.machines.walk import led, paths_to_all


def _worker_is_usable_while_functions_may_run(build: ModuleType) -> None:
    for state, path in paths_to_all(WORKER, build).items():
        machine = led(WORKER, build, path)
        may_call = state.name in {"STARTING", "RUNNING", "DRAINING"}
        assert machine.is_usable is may_call
        assert machine.is_draining is (state.name in {"DRAINING", "CLOSED"})
        assert machine.is_running is (state.name == "RUNNING")
        try:
            machine.check_running()
        except NotStartedError:
            assert not may_call
        else:
            assert may_call


WORKER: Final = Machine(
    name="A worker",
    about="The life of a worker: it starts once and drains once. A copy in a forked "
    "child cannot be used.",
    source=lifecycle,
    states="WorkerState",
    events="Event",
    starts=("NEW",),
    begin=lambda build, _: build.Lifecycle("a"),
    feed=lambda machine, event: machine.advance(event),
    meanings={
        "NEW": "the worker has not been started",
        "STARTING": "the worker meets the others of its group",
        "RUNNING": "the worker makes and serves calls",
        "DRAINING": "the worker refuses new calls, and ends those in flight",
        "CLOSED": "the worker has shut down",
        "FORKED": "the worker is a copy in a forked child",
        "START": "the program enters the worker",
        "STARTED": "the worker has met the others",
        "SHUT_DOWN": "the program leaves the worker, or its start failed",
        "DRAINED": "no call is in flight, or the time for it has passed",
        "FORK": "the process was forked, and this is the child",
    },
    stories="""
it is used and shut down:
    NEW -START-> STARTING -STARTED-> RUNNING -SHUT_DOWN-> DRAINING -DRAINED-> CLOSED
its start fails: NEW -START-> STARTING -SHUT_DOWN-> DRAINING -DRAINED-> CLOSED
it cannot be started again: CLOSED -START-x
it cannot be started twice: STARTING -START-x -STARTED-> RUNNING -START-x
it is shut down once: DRAINING -SHUT_DOWN-x -DRAINED-> CLOSED -SHUT_DOWN-x
it cannot be shut down before its start: NEW -SHUT_DOWN-x -DRAINED-x
it drains only once it is shut down: RUNNING -DRAINED-x
what was never started has nothing to lose by a fork: NEW -FORK-x
its process forks while it starts: STARTING -FORK-> FORKED -FORK-> FORKED
its process forks while it runs: RUNNING -FORK-> FORKED -STARTED-x -START-x
its process forks while it drains: DRAINING -FORK-> FORKED -DRAINED-x
its process forks later: CLOSED -FORK-> FORKED -SHUT_DOWN-x
""",
    refusals={
        (state.name, "START"): "AlreadyStartedError"
        for state in lifecycle.WorkerState
        if state is not lifecycle.WorkerState.NEW
    },
    checks=(_worker_is_usable_while_functions_may_run,),
    guards=guards(r"""
a-second-start-is-no-mistake-of-the-program:
    if event is Event.START and self.state is not NEW: => if False:
impossible-event-changes-the-worker:
    following = TRANSITIONS.after( =>
    self.is_usable = False\n        following = TRANSITIONS.after(
a-worker-that-drains-is-of-no-use:
    _USABLE: Final = frozenset({STARTING, RUNNING, DRAINING}) =>
    _USABLE: Final = frozenset({STARTING, RUNNING})
a-worker-that-starts-is-of-no-use:
    _USABLE: Final = frozenset({STARTING, RUNNING, DRAINING}) =>
    _USABLE: Final = frozenset({RUNNING, DRAINING})
a-closed-worker-does-not-drain:
    _DRAINING: Final = frozenset({DRAINING, CLOSED}) =>
    _DRAINING: Final = frozenset({DRAINING})
usable-is-not-kept-up:
    self.is_usable = following in _USABLE =>
    self.is_usable = self.is_usable or following in _USABLE
"""),
)
