"""Stages of a pipeline."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from asyncrpc.parallel.pipeline import schedules
from tests.property.machines.spec import Machine, guards


class _OneChunk:
    """A stage in a step of one micro-batch."""

    def __init__(self, build: ModuleType) -> None:
        self._actions: dict[str, Any] = {
            name: build.StageAction(build.ActionKind[kind], 0)
            for name, kind in (("FORWARD", "FORWARD"), ("END", "BACKWARD"))
        }
        place = build.StagePosition(0, 2)
        self.stage: Any = build.StageMachine("gpipe", place, 1)

    def on(self, event: Any) -> None:
        """Let an event happen to the micro-batch."""
        match event.name:
            case "INPUT":
                self.stage.arrive(0)
            case "ANSWER":
                self.stage.answer(0)
            case name:
                self._run(self._actions[name])

    def _run(self, action: Any) -> None:
        if action == self.stage.due:
            self.stage.begin(action)
        self.stage.end(action)


MICRO_BATCH: Final = Machine(
    name="A micro-batch at a stage",
    about="The states of one micro-batch at a stage of a pipeline.",
    source=schedules,
    states="ChunkState",
    starts=("AWAITED",),
    begin=lambda build, _: _OneChunk(build),
    state_of=lambda machine: machine.stage.state(0),
    stories="""
it goes forward and backward:
    AWAITED -INPUT-> ARRIVED -FORWARD-> HELD -ANSWER-> ANSWERED -END-> DONE
its input comes once: ARRIVED -INPUT-x
it waits for its input: AWAITED -FORWARD-x -ANSWER-x
it waits for the next stage: HELD -END-x
it ends once: DONE -END-x -INPUT-x
""",
    tests=("tests/unit/core/nn/test_schedules.py",),
    guards=guards("""
an-action-runs-before-it-is-due: if action != self.due: => if False:
backward-before-the-next-stage-has-answered:
    ActionKind.BACKWARD: ChunkState.ANSWERED, => ActionKind.BACKWARD: ChunkState.HELD,
stage-never-lets-go: self.held -= 1 => self.held -= 0
a-stage-holds-one-more:
    return min(place.stages - place.index, chunks) =>
    return min(place.stages - place.index + 1, chunks)
"""),
)
