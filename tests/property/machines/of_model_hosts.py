"""A model's process, and the web workers that come to it and back to it."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from asyncrpc.serving.model_host.machine import attachment, occupancy
from tests.property.machines.spec import Machine, guards
from tests.property.machines.walk import led, paths_to_all

# --- attachment ----------------------------------------------------------------------

LOSABLE: Final = {"SEEKING", "STARTING", "LOADING", "READY"}


def _ready(build: ModuleType, now_s: float = 0.0) -> Any:
    machine = build.Attachment()
    _come_back(build, machine, now_s)
    return machine


def _come_back(build: ModuleType, machine: Any, now_s: float) -> None:
    for event in (build.AttachmentEvent.FOUND, build.AttachmentEvent.ATTACHED):
        machine.advance(event)
    machine.load(now_s)
    assert machine.state.name == "READY"


def _loss_counts_only_where_a_process_can_be_lost(build: ModuleType) -> None:
    for state, path in paths_to_all(ATTACHMENT, build).items():
        machine = led(ATTACHMENT, build, path)
        machine.lose(7.0, "it was killed")
        if state.name in LOSABLE:
            assert (machine.state.name, machine.losses, machine.failures) == (
                "RESTING",
                1,
                1,
            )
            assert (machine.problem, machine.wakes_at_s) == ("it was killed", 7.1)
        else:
            assert (machine.state, machine.losses, machine.failures) == (state, 0, 0)
            assert (machine.problem, machine.wakes_at_s) == ("", None)


def _rests_grow_and_the_sixth_loss_trips(build: ModuleType) -> None:
    machine, now_s, rests = _ready(build), 0.0, []
    for number in range(1, 9):
        machine.lose(now_s, f"loss {number}")
        assert machine.failures == machine.losses == number
        assert machine.state.name == ("RESTING" if number <= 5 else "TRIPPED")
        rests.append(round(machine.wakes_at_s - now_s, 3))
        left_s = machine.rest(now_s)
        assert left_s == machine.wakes_at_s - now_s
        assert machine.state.name in {"RESTING", "TRIPPED"}
        now_s = machine.wakes_at_s
        assert machine.rest(now_s) == 0.0
        assert (machine.state.name, machine.wakes_at_s) == ("SEEKING", None)
    assert rests == [0.1, 0.2, 0.4, 0.8, 1.6, 30.0, 30.0, 30.0]


def _long_readiness_ends_the_row_of_losses(build: ModuleType) -> None:
    for stayed_s, failures in ((59.9, 4), (60.0, 1)):
        machine = _ready(build)
        for _ in range(3):
            machine.lose(0.0, "early")
            machine.rest(100.0)
            _come_back(build, machine, 100.0)
        machine.lose(100.0 + stayed_s, "late")
        assert (machine.failures, machine.losses) == (failures, 4)


def _readiness_counts_once_from_its_beginning(build: ModuleType) -> None:
    """A loss while it starts again is no loss of a process that stayed ready."""
    machine = _ready(build)
    machine.load(50.0)  # told twice
    machine.lose(60.0, "first")
    assert machine.failures == 1
    machine.rest(61.0)
    machine.lose(200.0, "second, before it was ready")
    assert machine.failures == 2
    other = build.Attachment()
    other.lose(0.0, "third")
    other.rest(100.0)
    other.load(100.0)  # not even attached
    other.lose(200.0, "fourth")
    assert other.failures == 2


def _seeking_attachment_has_no_rest(build: ModuleType) -> None:
    machine = build.Attachment()
    assert machine.rest(0.0) == 0.0
    assert machine.state.name == "SEEKING"


def _tripped_rest_is_the_longest(build: ModuleType) -> None:
    assert build.REST_S * 2 ** (build.FAILURES_MAX - 1) <= build.REST_MAX_S


ATTACHMENT: Final = Machine(
    name="A web worker and its model process",
    about="How a web worker comes to the process of a `ModelHost`, and back to it after"
    " its loss.",
    source=attachment,
    states="AttachmentState",
    starts=("SEEKING",),
    begin=lambda build, _: build.Attachment(),
    feed=lambda machine, event: machine.advance(event),
    stories="""
it is the first, starts the process, and leaves one day:
    SEEKING -FOUND-> STARTING -ATTACHED-> LOADING -LOADED-> READY -CLOSED-> CLOSED
the process is killed while it serves: READY -LOST-> RESTING -RESTED-> SEEKING
it is killed, or dies, before it listens: STARTING -LOST-> RESTING
the model cannot be made: LOADING -LOST-> RESTING
no process can be started, as there is no memory: SEEKING -LOST-> RESTING
all this has happened too often in a row:
    SEEKING -LOST_AGAIN-> TRIPPED -RESTED-> SEEKING
all this has happened too often in a row, in STARTING: STARTING -LOST_AGAIN-> TRIPPED
all this has happened too often in a row, in LOADING: LOADING -LOST_AGAIN-> TRIPPED
all this has happened too often in a row, in READY: READY -LOST_AGAIN-> TRIPPED
an operator lets the process end: READY -ENDING-> LEAVING -GONE-> SEEKING
it is told to end while it makes its model: LOADING -ENDING-> LEAVING
the process has older code than the web worker wants: STARTING -ENDING-> LEAVING
the process that is found has just begun to end: SEEKING -FOUND_ENDING-> LEAVING
the web worker leaves, whatever is being done: SEEKING -CLOSED-> CLOSED
the web worker leaves, whatever is being done, in STARTING: STARTING -CLOSED-> CLOSED
the web worker leaves, whatever is being done, in LOADING: LOADING -CLOSED-> CLOSED
the web worker leaves, whatever is being done, in LEAVING: LEAVING -CLOSED-> CLOSED
the web worker leaves, whatever is being done, in RESTING: RESTING -CLOSED-> CLOSED
the web worker leaves, whatever is being done, in TRIPPED:
    TRIPPED -CLOSED-> CLOSED -LOST-> CLOSED -LOADED-> CLOSED
""",
    checks=(
        _loss_counts_only_where_a_process_can_be_lost,
        _rests_grow_and_the_sixth_loss_trips,
        _long_readiness_ends_the_row_of_losses,
        _readiness_counts_once_from_its_beginning,
        _seeking_attachment_has_no_rest,
        _tripped_rest_is_the_longest,
    ),
    guards=guards(r"""
a-loss-counts-after-the-end:
    if AttachmentEvent.LOST not in TRANSITIONS[self.state]: => if False:
a-row-never-ends:
    self.failures = 0\n        self.failures += 1 => pass\n        self.failures += 1
a-moment-of-readiness-ends-the-row:
    and now_s - ready_s >= STEADY_S => and now_s >= ready_s
a-row-ends-a-moment-late: now_s - ready_s >= STEADY_S => now_s - ready_s > STEADY_S
readiness-before-the-last-loss-counts:
    ready_s, self._ready_s = self._ready_s, None => ready_s = self._ready_s
readiness-counts-before-loading:
    if self.state is AttachmentState.LOADING:\n            self._ready_s =>
    if True:\n            self._ready_s
fewer-losses-trip:
    is_too_often = self.failures > FAILURES_MAX =>
    is_too_often = self.failures >= FAILURES_MAX
rests-do-not-grow: REST_S * 2.0 ** (self.failures - 1) => REST_S * 2.0 ** 0
the-tripped-rest-as-shortly-as-others:
    (REST_MAX_S if is_too_often else rest_s) => rest_s
a-rest-ends-at-once: if left_s <= 0: => if left_s <= 100:
a-rest-is-not-forgotten:
    self.wakes_at_s = None\n            self.advance => self.advance
"""),
)


# --- occupancy -----------------------------------------------------------------------

LINGER_S: Final = 100.0


def _process_waits_for_its_first_and_after_its_last_worker(build: ModuleType) -> None:
    machine = build.Occupancy(LINGER_S, 7.0)
    assert machine.ends_at_s == 107.0
    machine.come()
    machine.come()
    assert (machine.state.name, machine.attached, machine.ends_at_s) == (
        "SERVING",
        2,
        None,
    )
    machine.elapse(1e9)
    machine.leave(200.0)
    assert (machine.state.name, machine.attached, machine.ends_at_s) == (
        "SERVING",
        1,
        None,
    )
    machine.leave(300.0)
    assert (machine.state.name, machine.attached, machine.ends_at_s) == (
        "ALONE",
        0,
        400.0,
    )
    machine.elapse(399.9)
    assert machine.state.name == "ALONE"
    machine.elapse(400.0)
    assert machine.state.name == "ENDING"


def _first_worker_has_time_to_come(build: ModuleType) -> None:
    """Even if the process is not to wait for others: whoever started it may be dead."""
    machine = build.Occupancy(0.0, 7.0)
    assert machine.ends_at_s == 7.0 + build.FIRST_S
    machine.come()
    machine.leave(20.0)
    assert machine.ends_at_s == 20.0


def _error_stays_for_a_while(build: ModuleType) -> None:
    """Web workers that come and go neither shorten nor extend it."""
    for linger_s, stays_s in ((0.0, build.UNMADE_S), (LINGER_S, LINGER_S)):
        machine = build.Occupancy(linger_s, 7.0)
        machine.come()
        machine.fail(50.0)
        assert (machine.state.name, machine.ends_at_s) == ("UNMADE", 50.0 + stays_s)
        assert machine.takes_others
        machine.come()
        machine.leave(50.1)
        machine.leave(50.2)
        assert (machine.state.name, machine.ends_at_s) == ("UNMADE", 50.0 + stays_s)
        machine.elapse(50.0 + stays_s)
        assert machine.state.name == "ENDING"
        machine.fail(99.0)
        assert machine.ends_at_s == 50.0 + stays_s


def _process_takes_others_unless_it_ends(build: ModuleType) -> None:
    for state, path in paths_to_all(OCCUPANCY, build).items():
        machine = led(OCCUPANCY, build, path)
        assert machine.takes_others is (state.name not in {"RETIRED", "ENDING"})


def _retired_process_ends_with_its_last_web_worker(build: ModuleType) -> None:
    machine = build.Occupancy(LINGER_S, 7.0)
    machine.come()
    machine.come()
    machine.advance(build.OccupancyEvent.OUTDATED)
    machine.leave(8.0)
    assert machine.state.name == "RETIRED"
    machine.leave(9.0)
    assert (machine.state.name, machine.attached) == ("ENDING", 0)


OCCUPANCY: Final = Machine(
    name="A model process and its web workers",
    about="How long the process of a `ModelHost` lives, which nothing owns.",
    source=occupancy,
    states="OccupancyState",
    starts=("ALONE",),
    begin=lambda build, _: build.Occupancy(LINGER_S, 0.0),
    feed=lambda machine, event: machine.advance(event),
    stories="""
web workers come, are reloaded, and leave for good:
    ALONE -CAME-> SERVING -ALL_LEFT-> ALONE -CAME-> SERVING -ALL_LEFT-> ALONE
    -TIME_UP-> ENDING
others come: SERVING -CAME-> SERVING
the code has been changed before the web workers come back: ALONE -OUTDATED-> ENDING
it has been changed, and web workers are reloaded one by one:
    SERVING -OUTDATED-> RETIRED -OUTDATED-> RETIRED -ALL_LEFT-> ENDING
the model cannot be made:
    SERVING -UNMADE-> UNMADE -ALL_LEFT-> UNMADE -CAME-> UNMADE -TIME_UP-> ENDING
it cannot be made, and there is no web worker any more: ALONE -UNMADE-> UNMADE
it cannot be made in a process that has been replaced meanwhile:
    RETIRED -UNMADE-> UNMADE
the program that failed has been corrected: UNMADE -OUTDATED-> ENDING
an operator lets it end: ALONE -TOLD_TO_END-> ENDING
an operator lets it end, in SERVING: SERVING -TOLD_TO_END-> ENDING
an operator lets it end, in RETIRED: RETIRED -TOLD_TO_END-> ENDING
an operator lets it end, in UNMADE:
    UNMADE -TOLD_TO_END-> ENDING -CAME-> ENDING -TIME_UP-> ENDING
""",
    checks=(
        _process_waits_for_its_first_and_after_its_last_worker,
        _first_worker_has_time_to_come,
        _error_stays_for_a_while,
        _process_takes_others_unless_it_ends,
        _retired_process_ends_with_its_last_web_worker,
    ),
    guards=guards(r"""
the-first-have-no-time: now_s + max(linger_s, FIRST_S) => now_s + linger_s
first-worker-has-less-time-than-others:
    now_s + max(linger_s, FIRST_S) => now_s + FIRST_S
serving-process-ends:
    if self.state is OccupancyState.SERVING:\n            self.ends_at_s = None =>
one-leaving-worker-counts-for-all: if self.attached:\n            return =>
process-ends-with-its-last-worker:
    self.ends_at_s = now_s + self._linger_s => self.ends_at_s = now_s
leaving-worker-extends-an-error:
    if self.state is OccupancyState.ALONE:\n            self.ends_at_s =>
    if True:\n            self.ends_at_s
error-ends-before-waiting-workers-see-it:
    now_s + max(self._linger_s, UNMADE_S) => now_s + self._linger_s
an-error-stays-for-a-moment: now_s + max(self._linger_s, UNMADE_S) => now_s + UNMADE_S
an-error-in-the-end-extends-it:
    if self.state is OccupancyState.UNMADE:\n            self.ends_at_s =>
    if True:\n            self.ends_at_s
a-retired-process-takes-others:
    not in {OccupancyState.RETIRED, OccupancyState.ENDING} =>
    is not OccupancyState.ENDING
a-process-that-ends-takes-others:
    not in {OccupancyState.RETIRED, OccupancyState.ENDING} =>
    is not OccupancyState.RETIRED
time-is-up-a-moment-late: now_s >= self.ends_at_s => now_s > self.ends_at_s
time-is-always-up:
    self.ends_at_s is not None and now_s >= self.ends_at_s => self.ends_at_s is not None
"""),
)
