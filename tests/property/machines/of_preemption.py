"""The end of a worker that its scheduler announces."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any, Final

from asyncrpc.clusters.preemption.machine import preempting
from tests.property.machines.spec import Machine, guards
from tests.property.machines.walk import led, paths_to_all

GRACE_S: Final = 100.0


def _grace_is_shared_out_in_order(build: ModuleType) -> None:
    """No state outlasts the grace, and a later one has no earlier end."""
    ends = list(build.SHARES.values())
    assert ends == sorted(ends)
    assert 0 < ends[0] < ends[-1] < 1
    for state, path in paths_to_all(PREEMPTION, build).items():
        machine = led(PREEMPTION, build, path)
        machine.noticed_at_s = None
        assert machine.wakes_at_s is None
        machine.noticed_at_s = 7.0
        is_waiting = state.name not in {"WATCHING", "ENDED"}
        assert (machine.wakes_at_s is not None) is is_waiting, state
        if is_waiting:
            assert machine.wakes_at_s == 7.0 + build.SHARES[state] * GRACE_S


def _notice(build: ModuleType, *, is_lockstep: bool, steps: int) -> Any:
    machine = build.Preempting(GRACE_S, is_lockstep=is_lockstep)
    for _ in range(steps):
        assert machine.may_step
        machine.begin_step()
    machine.notice(7.0)
    assert machine.noticed_at_s == 7.0
    machine.notice(9.0)
    assert machine.noticed_at_s == 7.0, "a second notice counts"
    return machine


def _open_steps_may_end_and_no_other_begins(build: ModuleType) -> None:
    for steps in range(4):
        machine = _notice(build, is_lockstep=False, steps=steps)
        for left in range(steps, 0, -1):
            assert machine.state.name == "FINISHING"
            assert machine.steps_open == left
            assert not machine.may_step
            machine.end_step()
        assert machine.state.name == "SAVING"
        assert not machine.may_step
        assert not machine.was_torn


def _workers_in_lockstep_end_with_the_same_step(build: ModuleType) -> None:
    """Whatever each had begun and ended, when the group agrees on the latest."""
    for begun in itertools.product(range(4), repeat=2):
        latest = max(begun)
        for steps, ended_before in itertools.product(begun, (False, True)):
            machine = _notice(build, is_lockstep=True, steps=steps)
            assert machine.state.name == "AGREEING"
            for _ in range(steps if ended_before else 0):
                machine.end_step()
                assert not machine.may_step
            assert machine.state.name == "AGREEING"
            machine.agree(latest)
            for _ in range(2 * latest):
                if machine.may_step:
                    machine.begin_step()
                if machine.steps_open:
                    machine.end_step()
            assert machine.state.name == "SAVING"
            assert machine.steps_begun == latest
            assert machine.steps_open == 0
            assert not machine.was_torn


def _worker_without_steps_has_none_to_catch_up(build: ModuleType) -> None:
    machine = _notice(build, is_lockstep=True, steps=0)
    machine.agree(0)
    assert machine.state.name == "SAVING"


def _exit_code_tells_whether_all_was_saved(build: ModuleType) -> None:
    for unsaved, is_torn in itertools.product((0, 1), (False, True)):
        machine = _notice(build, is_lockstep=False, steps=1)
        if is_torn:
            machine.advance(build.PreemptionEvent.TIME_UP)
            assert machine.exit_code(15) == 143
        else:
            machine.end_step()
        assert machine.was_torn is is_torn
        assert machine.exit_code(15) == 143, "the callbacks have not ended"
        machine.on_saved(unsaved)
        was_saved = not unsaved and not is_torn
        assert machine.exit_code(15) == (75 if was_saved else 143)


def _late_end_of_a_step_changes_nothing(build: ModuleType) -> None:
    machine = _notice(build, is_lockstep=False, steps=1)
    machine.advance(build.PreemptionEvent.TIME_UP)
    machine.end_step()
    assert machine.state.name == "SAVING"
    assert machine.was_torn


def _steps_before_any_notice_are_only_counted(build: ModuleType) -> None:
    machine = build.Preempting(GRACE_S, is_lockstep=False)
    machine.begin_step()
    machine.end_step()
    assert (machine.state.name, machine.steps_begun, machine.steps_open) == (
        "WATCHING",
        1,
        0,
    )
    machine.advance(build.PreemptionEvent.BLOCK_ENDED)
    machine.notice(7.0)
    assert machine.state.name == "ENDED"
    assert machine.noticed_at_s is None


PREEMPTION: Final = Machine(
    name="A worker that is preempted",
    about="What a worker does between the notice of its end and that end.",
    source=preempting,
    states="PreemptionState",
    starts=("WATCHING",),
    begin=lambda build, _: build.Preempting(GRACE_S, is_lockstep=False),
    feed=lambda machine, event: machine.advance(event),
    stories="""
nobody announces an end: WATCHING -BLOCK_ENDED-> ENDED -NOTICE-> ENDED
it waits between two steps when the end is announced:
    WATCHING -NOTICE-> SAVING -SAVED-> STOPPING -BLOCK_ENDED-> LEAVING -LEFT-> ENDED
it is in a step:
    WATCHING -NOTICE_IN_STEP-> FINISHING -STEPS_ENDED-> SAVING -SAVED-> STOPPING
its step takes too long: FINISHING -TIME_UP-> SAVING
the group makes one step more:
    WATCHING -NOTICE_IN_LOCKSTEP-> AGREEING -STEPS_LEFT-> FINISHING
    -STEPS_ENDED-> SAVING
the group has just made its last step:
    WATCHING -NOTICE_IN_LOCKSTEP-> AGREEING -STEPS_ENDED-> SAVING
the program looks at the notice itself and ends the block:
    FINISHING -BLOCK_ENDED-> SAVING_LAST -SAVED-> LEAVING
the block ends while the group agrees: AGREEING -BLOCK_ENDED-> SAVING_LAST
the block ends while the callbacks run:
    SAVING -BLOCK_ENDED-> SAVING_LAST -BLOCK_ENDED-> SAVING_LAST -SAVED-> LEAVING
the block does not heed its cancellation:
    STOPPING -TIME_UP-> LEAVING -BLOCK_ENDED-> LEAVING -LEFT-> ENDED
notices are repeated:
    SAVING -NOTICE-> SAVING -NOTICE_IN_STEP-> SAVING -NOTICE_IN_LOCKSTEP-> SAVING
""",
    checks=(
        _grace_is_shared_out_in_order,
        _open_steps_may_end_and_no_other_begins,
        _workers_in_lockstep_end_with_the_same_step,
        _worker_without_steps_has_none_to_catch_up,
        _exit_code_tells_whether_all_was_saved,
        _late_end_of_a_step_changes_nothing,
        _steps_before_any_notice_are_only_counted,
    ),
    guards=guards(r"""
a-torn-state-counts-as-saved:
    if self.unsaved == 0 and not self.was_torn: => if self.unsaved == 0:
unsaved-state-counts-as-saved:
    if self.unsaved == 0 and not self.was_torn: => if not self.was_torn:
a-step-begins-between-the-notice-and-the-agreement:
    return self.state is PreemptionState.WATCHING =>
    return self.state is not PreemptionState.SAVING
workers-do-not-catch-up: return self._steps_left > 0 => return False
a-step-too-many: return self._steps_left > 0 => return self._steps_left >= 0
the-first-of-several-steps-ends-all:
    if is_finishing and not self.steps_open and self._steps_left <= 0: =>
    if is_finishing and self._steps_left <= 0:
worker-behind-saves-early:
    if is_finishing and not self.steps_open and self._steps_left <= 0: =>
    if is_finishing and not self.steps_open:
an-end-of-a-step-ends-the-agreement:
    is_finishing = self.state is PreemptionState.FINISHING => is_finishing = True
open-steps-are-not-waited-for-after-the-agreement:
    if self.steps_open or self._steps_left > 0: => if self._steps_left > 0:
worker-behind-does-not-go-on:
    if self.steps_open or self._steps_left > 0: => if self.steps_open:
a-second-notice-extends-the-grace:
    if self.state is not PreemptionState.WATCHING:
    \n            return
    \n        self.noticed_at_s =>
    self.noticed_at_s
a-torn-state-is-not-noticed:
    self.was_torn = self.steps_open > 0 => self.was_torn = False
the-time-does-not-count-from-the-notice:
    return self.noticed_at_s + SHARES[self.state] * self.grace_s =>
    return SHARES[self.state] * self.grace_s
"""),
)
