"""The local part of a backward pass: ready segments run, their results are sent on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import suppress
from contextvars import Context as Variables
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch

from asyncrpc.core.autograd.engine import Engine, Leaving, SegmentRun, prepare
from asyncrpc.core.autograd.functions import leaves_of
from asyncrpc.core.autograd.inline import Runner
from asyncrpc.core.autograd.messages import PassAnswer
from asyncrpc.core.autograd.placing import on_devices_of
from asyncrpc.core.autograd.requests import PassRequests
from asyncrpc.core.autograd.segment_events import SegmentEvents
from asyncrpc.core.autograd.state import ABORTED, Pass
from asyncrpc.core.ids import ContextId, Incarnation, WorkerId
from asyncrpc.core.loop.waits import works_for
from asyncrpc.core.parts import Parts
from asyncrpc.core.trace.events import outcome_of
from asyncrpc.errors import AutogradError

T = TypeVar("T")

# Given the autograd context, and the variables of the task that began the pass.
VariablesOf: TypeAlias = Callable[[ContextId, Variables | None], Variables]

# Given the maker of an optimizer, the number of a step, and gradients: whether the step
# cannot raise with them; None: this worker has no part of the optimizer.
VoteOnStep: TypeAlias = Callable[
    [Incarnation, int, Mapping[torch.Tensor, torch.Tensor]], bool | None
]
# Given the maker of an optimizer and a step: takes it; returns the answer.
TakeStep: TypeAlias = Callable[
    [WorkerId, list[Any]], Coroutine[Any, Any, list[Any] | None]
]

# The answer to a worker that is not the first to ask: the first gets the reports.
NOTHING_NEW: Final = PassAnswer([], [], [], [], None, None)


class PassWork:
    """Runs the parts of this worker's graph that belong to passes.

    Attributes:
        vote: on the step of an optimizer that is to follow a pass; None: nothing votes.
        take_step: takes the step that came with a pass's last gradients; None: nothing
            does.
    """

    def __init__(
        self,
        me: Incarnation,
        engine: Engine,
        requests: PassRequests,
        worker: Parts,
        *,
        events: SegmentEvents,
        variables_of: VariablesOf,
    ) -> None:
        self._me = me
        self._engine = engine
        self._requests = requests
        self._worker = worker
        self._events = events
        self._variables_of = variables_of
        self._runner = Runner(worker, engine.lock)
        self.vote: VoteOnStep | None = None
        self.take_step: TakeStep | None = None

    async def work(
        self, backward_pass: Pass, asked_by: Incarnation | None = None
    ) -> PassAnswer:
        """Run what is ready; return the answer for the worker that asked.

        Args:
            asked_by: the worker that asked; None: this one, which began the pass.
        """
        if not backward_pass.wave.engage(asked_by):
            if not backward_pass.wave.is_running:  # else the running task looks again
                backward_pass.wave.is_running = (
                    True  # from now on: this worker must not count as idle
                )
                # First the gradients that others wait for, then the answer.  If this
                # fails, the pass has failed, and its waiters know.
                with suppress(Exception):
                    await self._drain(backward_pass)
            return NOTHING_NEW
        if not backward_pass.wave.is_running:
            backward_pass.wave.is_running = True
            await self._drain(backward_pass)
        await backward_pass.idle()
        return backward_pass.answer(self._me, is_sure=self._vote(backward_pass))

    async def close(
        self, backward_pass: Pass, asked_by: Incarnation | None = None
    ) -> PassAnswer:
        """Continue, knowing that no further workers take part, and tell the others."""
        if backward_pass.is_settled:
            return NOTHING_NEW
        backward_pass.is_settled = True
        backward_pass.machine.rule_out()
        self._requests.close(backward_pass)
        return await self.work(backward_pass, asked_by)

    def _vote(self, backward_pass: Pass) -> bool | None:
        """Vote on the step that is to follow a pass, if that is asked for."""
        if backward_pass.votes_on is None or self.vote is None:
            return None
        gathered = backward_pass.state.gradients_with(backward_pass.flow.staged)
        if gathered is None:
            return None
        maker = backward_pass.ids.pass_id.root
        return self.vote(maker, backward_pass.votes_on, gathered)

    @works_for(lambda at: at["backward_pass"])
    async def _drain(self, backward_pass: Pass) -> None:
        """Run segments until none is ready; send their results on."""
        try:
            while await self._run_segment(backward_pass):
                backward_pass.check()
            if (
                backward_pass.flow.endings
                and backward_pass.machine.is_done
                and not backward_pass.machine.unsettled
            ):
                end = partial(self._engine.end, backward_pass.flow)
                await self._in_thread(backward_pass, None, end)
                backward_pass.check()
        except asyncio.CancelledError:
            backward_pass.fail(AutogradError(ABORTED))
            raise  # the thread goes on
        except BaseException as error:  # a user's hook may exit
            backward_pass.wave.is_running = False
            backward_pass.fail(error)
            raise
        backward_pass.wave.is_running = False
        backward_pass.look_up()

    async def _run_segment(self, backward_pass: Pass) -> bool:
        """Run a segment if one is ready; return whether it was."""
        segment = backward_pass.machine.next_segment()
        if segment is None:
            self._requests.send(backward_pass, list(backward_pass.new), [], {})
            return False
        self._requests.send_ahead(backward_pass)
        if not segment.is_whole and backward_pass.new:
            ready = set(leaves_of(segment.nodes)[1])
            later = [leaf for leaf in backward_pass.new if leaf not in ready]
            self._requests.send(backward_pass, later, [], {})
        arrived = {key: backward_pass.arrived.pop(key) for key in segment.starts}
        nodes, began_s = len(segment.nodes), self._events.now_s()
        entered = [key for key, gradient in arrived.items() if gradient is not None]
        starts = [
            (backward_pass.edges[key], gradient) for key, gradient in arrived.items()
        ]
        entering = [gradient for _, gradient in starts if gradient is not None]
        entering += backward_pass.flow.entering.values()
        prepared = partial(
            prepare,
            segment,
            starts,
            backward_pass.region,
            backward_pass.flow,
            backward_pass.keeping,
        )  # which may add gradients up
        run = await on_devices_of(self._worker, entering, prepared)
        leaving = run.straight_through()
        if leaving is None:
            try:
                leaving = await self._run(backward_pass, run)
            except BaseException as error:  # a user's hook may exit
                outcome = outcome_of(error)
                self._events.note(
                    backward_pass, nodes, began_s, entered, outcome=outcome
                )
                raise
        sent = [received.crossing for received in leaving]
        self._events.note(backward_pass, nodes, began_s, entered, sent)
        backward_pass.check()
        self._requests.send(backward_pass, [], run.received, leaving)
        return True

    async def _run(self, backward_pass: Pass, run: SegmentRun) -> Leaving:
        """Run a segment: in a thread, or at once if its kind is always short."""
        kind, job = run.kind, partial(self._engine.run, run)
        if self._runner.may_run_here(kind):
            return self._runner.run_here(kind, job)
        return await self._in_thread(backward_pass, kind, job)

    async def _in_thread(
        self, backward_pass: Pass, kind: Hashable | None, job: Callable[[], T]
    ) -> T:
        variables = self._variables_of(
            backward_pass.ids.context_id, backward_pass.variables
        )
        return await self._runner.run_in_thread(kind, partial(variables.run, job))
