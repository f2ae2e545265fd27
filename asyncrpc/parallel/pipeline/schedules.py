"""Schedules of a pipeline, as data: the actions of each stage, in order.

A batch is cut into micro-batches, whose number is the argument `chunks` of a pipeline.
Each goes forward through the stages and backward again; a stage does one action at a
time.  Schedules differ in how many micro-batches a stage may hold between the two:

    gpipe      all of them: first every forward, then every backward
    1f1b       as many as there are stages from this one to the last: then one
               backward follows each forward
    inference  two whose output the next stage has not taken; there is no backward

With stages that take the same time, `gpipe` and `1f1b` are equally fast: of the time
of a step, each stage is idle for `bubble(stages, chunks)`.  `1f1b` needs less memory.

This module decides the order of actions.  `stage` computes, and sends tensors.

Source: Huang et al., GPipe (2019); Narayanan et al., PipeDream (2019), for 1F1B, here
with the flush at the end of each step, as in torch.distributed.pipelining.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from asyncrpc.core.arguments import check_choice, check_count
from asyncrpc.core.state_table import StateTable
from asyncrpc.errors import LocalProtocolError

# One travels while the next is computed; more would only wait at the next stage.
OUTPUTS_AHEAD: Final = 2


class ActionKind(enum.Enum):
    """The kind of a stage's action on one micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RELEASE = "release"  # of an inference: the next stage has taken the output


class StageAction(NamedTuple):
    """One action of a stage, on one micro-batch."""

    kind: ActionKind
    chunk: int


@dataclass(frozen=True, slots=True)
class StagePosition:
    """The position of a stage in its pipeline.

    Attributes:
        index: from 0.
    """

    index: int
    stages: int

    @property
    def is_last(self) -> bool:
        """Return whether no stage follows."""
        return self.index == self.stages - 1

    def __str__(self) -> str:
        return f"stage {self.index} of {self.stages}"


def _all(_place: StagePosition, chunks: int) -> int:
    return chunks


def _to_the_last(place: StagePosition, chunks: int) -> int:
    return min(place.stages - place.index, chunks)


def _two(_place: StagePosition, chunks: int) -> int:
    return min(OUTPUTS_AHEAD, chunks)


INFERENCE: Final = "inference"
# How many micro-batches a stage may hold, and the action that lets go of one.
_SCHEDULES: Final[
    Mapping[str, tuple[Callable[[StagePosition, int], int], ActionKind]]
] = {
    "gpipe": (_all, ActionKind.BACKWARD),
    "1f1b": (_to_the_last, ActionKind.BACKWARD),
    INFERENCE: (_two, ActionKind.RELEASE),
}
TRAINING: Final = tuple(name for name in _SCHEDULES if name != INFERENCE)


def check_schedule(name: str, chunks: int) -> None:
    """Check the arguments of a training."""
    check_choice("schedule", name, TRAINING)
    check_count("chunks", chunks, at_least=1)


def held_max(schedule: str, place: StagePosition, chunks: int) -> int:
    """Return how many micro-batches a stage may hold at once."""
    limit, _ = _SCHEDULES[schedule]
    return limit(place, chunks)


def actions(
    schedule: str, place: StagePosition, chunks: int
) -> tuple[StageAction, ...]:
    """Return the actions of a stage, in order."""
    limit, after = _SCHEDULES[schedule]
    ahead = limit(place, chunks)
    order = [StageAction(ActionKind.FORWARD, chunk) for chunk in range(ahead)]
    for chunk in range(chunks):
        order.append(StageAction(after, chunk))
        if chunk + ahead < chunks:
            order.append(StageAction(ActionKind.FORWARD, chunk + ahead))
    return tuple(order)


def bubble(stages: int, chunks: int) -> float:
    """Return the fraction of a step that a stage is idle, if all are equally fast.

    Source: Huang et al., GPipe (2019), section 2.3.
    """
    return (stages - 1) / (chunks + stages - 1)


# --- one stage -----------------------------------------------------------------------


class ChunkState(enum.Enum):
    """The state of one micro-batch at one stage."""

    AWAITED = "its input has not come"
    ARRIVED = "its input is here"
    HELD = "its forward pass has run"
    ANSWERED = "the next stage has answered"
    DONE = "it is finished, and nothing of it is held"


class ChunkEvent(enum.Enum):
    """An event of a micro-batch at one stage."""

    INPUT = "its input came"
    FORWARD = "its forward pass ran"
    ANSWER = "the next stage answered"
    END = "its backward pass ran, or it was released"


TRANSITIONS: Final = StateTable(
    "a micro-batch",
    {
        ChunkState.AWAITED: {ChunkEvent.INPUT: ChunkState.ARRIVED},
        ChunkState.ARRIVED: {ChunkEvent.FORWARD: ChunkState.HELD},
        ChunkState.HELD: {ChunkEvent.ANSWER: ChunkState.ANSWERED},
        ChunkState.ANSWERED: {ChunkEvent.END: ChunkState.DONE},
        ChunkState.DONE: {},
    },
)
_NEEDED: Final = {
    ActionKind.FORWARD: ChunkState.ARRIVED,
    ActionKind.BACKWARD: ChunkState.ANSWERED,
    ActionKind.RELEASE: ChunkState.ANSWERED,
}


class StageMachine:
    """One stage in one step: which action is due, and how many micro-batches it holds.

    Attributes:
        held: micro-batches between the start of their forward pass and their end.
        held_most: the largest value of `held` so far.
    """

    def __init__(self, schedule: str, place: StagePosition, chunks: int) -> None:
        self._actions = actions(schedule, place, chunks)
        self._bound = held_max(schedule, place, chunks)
        self._next = 0
        self._states = [ChunkState.AWAITED] * chunks
        self.held = 0
        self.held_most = 0

    @property
    def is_done(self) -> bool:
        """Return whether all actions have run."""
        return self._next == len(self._actions)

    def state(self, chunk: int) -> ChunkState:
        """Return the state of a micro-batch."""
        return self._states[chunk]

    @property
    def due(self) -> StageAction | None:
        """The next action; None if its input is not here, or all actions have run."""
        if self.is_done:
            return None
        action = self._actions[self._next]
        is_ready = self._states[action.chunk] is _NEEDED[action.kind]
        return action if is_ready else None

    def arrive(self, chunk: int) -> None:
        """Record that the input of a micro-batch has come."""
        if not 0 <= chunk < len(self._states):
            raise LocalProtocolError(
                f"micro-batch {chunk} came for a step with {len(self._states)} of them"
            )
        self._advance(chunk, ChunkEvent.INPUT)

    def begin(self, action: StageAction) -> None:
        """Begin an action; from its forward pass on a micro-batch is held."""
        if action != self.due:
            raise LocalProtocolError(f"{action} is not due")
        if action.kind is ActionKind.FORWARD:
            self.held += 1
            self.held_most = max(self.held_most, self.held)
            assert self.held <= self._bound, "a schedule keeps its own bound"

    def end(self, action: StageAction) -> None:
        """Record that an action has run."""
        if action.kind is ActionKind.FORWARD:
            self._advance(action.chunk, ChunkEvent.FORWARD)
        else:
            self._advance(action.chunk, ChunkEvent.END)
            self.held -= 1
        self._next += 1

    def answer(self, chunk: int) -> None:
        """Record the next stage's answer for a micro-batch; the last answers itself."""
        self._advance(chunk, ChunkEvent.ANSWER)

    def _advance(self, chunk: int, event: ChunkEvent) -> None:
        self._states[chunk] = TRANSITIONS.after(
            self._states[chunk], event, f"micro-batch {chunk}"
        )


# --- all stages ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """One action and when it ran.

    Attributes:
        action: the action.
        start_s: seconds from the start of the step.
        end_s: seconds from the start of the step.
    """

    action: StageAction
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """The duration of the action."""
        return self.end_s - self.start_s


Seconds = Callable[[int, StageAction], float]


def simulate(
    schedule: str, stages: int, chunks: int, seconds: Seconds
) -> list[list[ActionSpan]]:
    """Return the spans of each stage, if values took no time to travel."""
    orders = [
        actions(schedule, StagePosition(k, stages), chunks) for k in range(stages)
    ]
    ends: dict[tuple[int, StageAction], float] = {}
    spans: list[list[ActionSpan]] = [[] for _ in range(stages)]
    while sum(map(len, spans)) < sum(map(len, orders)):
        before = len(ends)
        for stage, order in enumerate(orders):
            _run_ready(stage, order, spans[stage], ends, (stages, seconds))
        if len(ends) == before:
            raise LocalProtocolError(f"schedule {schedule!r} waits for itself")
    return spans


def _run_ready(
    stage: int,
    order: Sequence[StageAction],
    spans: list[ActionSpan],
    ends: dict[tuple[int, StageAction], float],
    timing: tuple[int, Seconds],
) -> None:
    """Run the actions of one stage as far as the other stages allow."""
    stages, seconds = timing
    while len(spans) < len(order):
        action = order[len(spans)]
        needed = _needed(stage, action, stages)
        if needed is not None and needed not in ends:
            return
        free_s = spans[-1].end_s if spans else 0.0
        start_s = max(free_s, 0.0 if needed is None else ends[needed])
        end_s = start_s + seconds(stage, action)
        spans.append(ActionSpan(action, start_s, end_s))
        ends[stage, action] = end_s


def _needed(
    stage: int, action: StageAction, stages: int
) -> tuple[int, StageAction] | None:
    """Return the action of another stage that must precede an action."""
    if action.kind is ActionKind.FORWARD:
        return (stage - 1, action) if stage else None
    if stage < stages - 1:
        return stage + 1, action
    return stage, StageAction(ActionKind.FORWARD, action.chunk)


def step_s(spans: Sequence[Sequence[ActionSpan]]) -> float:
    """Return the seconds from the first action of any stage to the end of the last."""
    every = [span for stage in spans for span in stage]
    if not every:
        return 0.0
    return max(span.end_s for span in every) - min(span.start_s for span in every)


def idle_part(spans: Sequence[ActionSpan], whole_s: float) -> float:
    """Return the fraction of `whole_s` seconds that a stage was idle."""
    if not whole_s:
        return 0.0
    return max(0.0, 1.0 - sum(span.duration_s for span in spans) / whole_s)
