"""Sequences that a model works on together, and the queue before it."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from asyncrpc.serving.batching.machine import fair_queue, overload, sequences
from tests.property.machines.spec import Machine, Part, guards, table_of


def _schedule(build: ModuleType, slots: int = 2, inside: int = 3) -> Any:
    limits = build.SequenceLimits(slots, inside, slots, 10)
    return build.SequenceSchedule(limits)


def _enter(build: ModuleType, schedule: Any, name: str, memory: int = 2) -> Any:
    sequence = build.ModelSequence(name, memory)
    schedule.admit(sequence)
    schedule.on_entered(sequence)
    return sequence


def _memory_is_held_until_the_model_lets_go(build: ModuleType) -> None:
    schedule = _schedule(build)
    left, refused = build.ModelSequence("left", 4), build.ModelSequence("refused", 3)
    schedule.admit(left)
    schedule.admit(refused)
    assert (schedule.memory_free, schedule.inside) == (3, 2)
    schedule.on_refused(refused)
    assert (schedule.memory_free, schedule.inside) == (6, 1)
    schedule.on_entered(left)
    schedule.close(left)
    assert (schedule.memory_free, schedule.inside) == (6, 1)
    assert schedule.leaving() == [left]
    schedule.on_left(left)
    schedule.on_left(left)
    assert (schedule.memory_free, schedule.inside) == (10, 0)
    assert not schedule.has_work


def _steps_fit_the_slots_and_all_get_their_turn(build: ModuleType) -> None:
    schedule = _schedule(build, slots=2, inside=4)
    all_of = [_enter(build, schedule, name) for name in "ab"]
    first = schedule.begin_step()
    assert first == all_of
    for sequence in first:
        schedule.on_stepped(sequence, is_last=False, is_behind=True)
    assert schedule.room == 2
    all_of += [_enter(build, schedule, name) for name in "cd"]
    for sequence in all_of[:2]:
        schedule.on_taken(sequence)
    seen = []
    for _ in range(4):
        chosen = schedule.begin_step()
        assert len(chosen) == 2
        assert schedule.room == 0
        seen.append("".join(sequence.subject for sequence in chosen))
        for sequence in chosen:
            schedule.on_stepped(sequence, is_last=False, is_behind=False)
    assert seen == ["cd", "ab", "cd", "ab"]


def _slow_sequence_waits_and_ended_one_leaves(build: ModuleType) -> None:
    schedule = _schedule(build)
    behind, over = _enter(build, schedule, "behind"), _enter(build, schedule, "over")
    for sequence in schedule.begin_step():
        schedule.on_stepped(sequence, is_last=sequence is over, is_behind=True)
    assert schedule.paused == (behind,)
    assert schedule.leaving() == [over]
    assert schedule.begin_step() == []
    assert schedule.has_work
    schedule.on_left(over)
    assert not schedule.has_work


def _narrowest_limit_sets_the_room(build: ModuleType) -> None:
    limits = build.SequenceLimits(3, 4, 2, None)
    schedule = build.SequenceSchedule(limits)
    assert (schedule.room, schedule.memory_free) == (2, None)
    for name in "ab":
        _enter(build, schedule, name)
    assert schedule.room == 1
    for sequence in schedule.begin_step():
        schedule.on_stepped(sequence, is_last=False, is_behind=True)
    assert schedule.room == 2
    _enter(build, schedule, "c")
    assert schedule.room == 1


def _inside_states_are_known(build: ModuleType) -> None:
    inside = {state.name for state in build.INSIDE}
    assert inside == {state.name for state in table_of(build)} - {"WAITING", "ENDED"}


_TESTS: Final = "tests/unit/serving/batching"

SEQUENCE: Final = Machine(
    name="A sequence that a model generates",
    about="Where a request of a `ContinuousBatcher` is, from its arrival until the "
    "model has dropped its state.",
    source=sequences,
    states="SequenceState",
    starts=("WAITING",),
    begin=lambda build, _: build.ModelSequence("", 1),
    feed=lambda machine, event: machine.advance(event),
    stories="""
it is generated in two steps:
    WAITING -ADMITTED-> ENTERING -ENTERED-> READY -STEP_BEGUN-> STEPPING
    -STEP_ENDED-> READY -STEP_BEGUN-> STEPPING -FINISHED-> LEAVING -LEFT-> ENDED
its consumer is behind for a while: STEPPING -FILLED-> PAUSED -TAKEN-> READY
its prompt makes no sense: WAITING -ADMITTED-> ENTERING -REFUSED-> ENDED
its consumer goes while it waits: WAITING -CLOSED-> ENDED
its consumer goes between two steps: READY -CLOSED-> LEAVING -LEFT-> ENDED
its consumer goes while it is paused: PAUSED -CLOSED-> LEAVING
its consumer goes during a step:
    STEPPING -CLOSED-> STEPPING_UNWANTED -STEP_ENDED-> LEAVING
and the step was the last one: STEPPING_UNWANTED -FINISHED-> LEAVING
and the step fills its queue: STEPPING_UNWANTED -FILLED-> LEAVING
its consumer goes while it enters:
    ENTERING -CLOSED-> ENTERING_UNWANTED -ENTERED-> LEAVING
and it cannot enter: ENTERING_UNWANTED -REFUSED-> ENDED
""",
    checks=(
        _memory_is_held_until_the_model_lets_go,
        _steps_fit_the_slots_and_all_get_their_turn,
        _slow_sequence_waits_and_ended_one_leaves,
        _narrowest_limit_sets_the_room,
        _inside_states_are_known,
    ),
    tests=(_TESTS,),
    guards=guards("""
memory-is-never-given-back: self.memory_held -= sequence.memory => pass
closed-request-frees-memory-it-never-held:
    if after is SequenceState.ENDED and before in INSIDE: =>
    if after is SequenceState.ENDED:
a-step-has-everyone:
    chosen = list(self._ready)[: self._limits.slots] => chosen = list(self._ready)
the-newest-step-first:
    chosen = list(self._ready)[: self._limits.slots] =>
    chosen = list(self._ready)[::-1][: self._limits.slots]
paused-ones-keep-their-slots:
    limits.slots - len(self._ready), =>
    limits.slots - len(self._ready) - len(self._paused),
inside-sequences-are-unlimited:
    limits.inside_max - len(self._inside), => limits.inside_max,
ended-sequence-is-paused: if is_last: => if is_last and not is_behind:
"""),
    parts=(
        Part(
            fair_queue,
            (),
            guards(r"""
a-client-is-not-charged: share.tag += cost => pass
idle-time-is-saved: share.tag = max(share.tag, self.clock) => pass
the-clock-stands:
    self.clock = max(self.clock + cost / self.clients, share.tag) =>
    self.clock = max(self.clock, share.tag)
idle-clients-are-not-forgotten: self._forget() => pass
priority-is-the-wrong-way-round:
    oldest.came_s - priority * self._priority_step_s, oldest.serial =>
    oldest.came_s + priority * self._priority_step_s, oldest.serial
priority-is-without-a-head-start:
    oldest.came_s - priority * self._priority_step_s, oldest.serial =>
    -priority, oldest.serial
oversized-request-is-passed-by:
    if request.size > size_free: => if request.size > size_free and batch:
a-client-goes-once-in-a-batch: if client in line.by_client: => if not line.by_client:
other-clients-have-no-turn-before:
    min(level.waiting, (own + 1) * clients - 1) => min(level.waiting, own)
all-requests-of-others-are-before:
    min(level.waiting, (own + 1) * clients - 1) => level.waiting
higher-priority-gives-way: if lowest > priority: => if lowest > priority + 1:
a-client-takes-more-than-its-share:
    if (own + 1) * level.clients > level.waiting: =>
    if own * level.clients > level.waiting:
the-first-of-the-longest-gives-way:
    return max(map(_last, lines), key=_serial) =>
    return min(map(_first, lines), key=_serial)
"""),
        ),
        Part(
            overload,
            (),
            guards(r"""
a-full-queue-takes-more:
    if len(waiting) >= limits.waiting_max: => if len(waiting) > limits.waiting_max:
doomed-request-waits:
    if age_max_s is not None and wait_s > age_max_s: =>
    if age_max_s is not None and wait_s > 2 * age_max_s:
a-free-place-does-not-count: if is_unlimited or self.rate.has_place: => if is_unlimited:
own-turn-does-not-count: (self.rate.turn_s if limits.whole_turns else 0.0) => 0.0
a-place-is-taken-in-vain: return problem, with_room is None => return problem, True
the-oldest-stays: return problem, with_room is None => return problem, False
slightly-late-request-is-dropped:
    oldest.came_s + age_s + self._error_s > now_s => oldest.came_s + age_s > now_s
queue-wakes-too-early-for-the-oldest:
    max(begin_s, oldest.came_s + age_s + self._error_s) =>
    oldest.came_s + age_s + self._error_s
a-queue-is-never-standing:
    bool(self.waiting) and now_s >= self._busy_since_s =>
    bool(self.waiting) and now_s < self._busy_since_s
a-queue-is-standing-for-ever:
    if not self.waiting:\n            self._busy_since_s =>
    if not self.counts.admitted:\n            self._busy_since_s
batches-without-end: if not self.queue.rate.has_place: => if False:
a-batch-waits-for-more:
    return count >= batch.max_size or ( => return count > batch.max_size or (
bytes-do-not-fill: nbytes >= batch.max_bytes => nbytes < 0
batch-queue-sleeps-through-a-due-batch:
    if self.queue.rate.has_place:\n            times += =>
    if not self.queue.rate.has_place:\n            times +=
bytes-cost-nothing: max(share, size_bytes / self.max_bytes) => share
old-turns-are-not-forgotten:
    weight = max(WEIGHT, 1 / self.ended) => weight = 1 / self.ended
places-do-not-share:
    turns_before * self.turn_s / self._places => turns_before * self.turn_s
a-late-turn-ends-in-the-past:
    first_s = max(0.0, oldest_s + self.turn_s - now_s) =>
    first_s = oldest_s + self.turn_s - now_s
room-is-said-too-early:
    math.ceil((waiting + 1) / self.requests) => math.floor(waiting / self.requests)
left-entries-are-kept: self._compact() => pass
left-entries-are-returned:
    while self._heap and self._heap[0][2] not in self._container: => while False:
"""),
        ),
    ),
)
