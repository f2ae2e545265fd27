"""Drives a model that makes steps with several sequences.

In a loop, one task lets sequences leave, lets others enter, makes a step, and hands the
items to their consumers.  `machine.sequences` decides which sequences take part, and
`machine.overload` which requests go next.

Invariants: the model's functions never run at the same time; `leave` is called once for
each state that `enter` made; a consumer gets its own items, each once and in order,
and then one end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from asyncrpc.core.loop.threads import settable
from asyncrpc.errors import (
    DeadlineExceededError,
    Outcome,
    RejectedError,
    UsageError,
)
from asyncrpc.extend import Deadline
from asyncrpc.serving.batching import queues
from asyncrpc.serving.batching.generation import Generation
from asyncrpc.serving.batching.machine.fair_queue import QueuedRequest
from asyncrpc.serving.batching.machine.overload import (
    DropReason,
    ServiceQueue,
    ServiceRate,
)
from asyncrpc.serving.batching.machine.sequences import (
    ModelSequence,
    SequenceSchedule,
    SequenceState,
)
from asyncrpc.serving.batching.model_thread import ModelThread
from asyncrpc.serving.batching.queues import checked_answers
from asyncrpc.serving.batching.sequence_model import SequenceModel
from asyncrpc.serving.batching.statistics import EndCounts

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

logger = logging.getLogger("asyncrpc")

WARM_UP_STEPS_MAX: Final = 32


class SequenceDriver(Generic[R, S, T]):
    """Makes the steps of one model.

    Attributes:
        queue: requests that wait to enter.
        is_closing: whether no further request will come.
    """

    def __init__(
        self,
        name: str,
        model: SequenceModel[R, S, T],
        queue: ServiceQueue[Generation[R, T]],
        schedule: SequenceSchedule[Generation[R, T]],
        *,
        pause_max_s: float,
    ) -> None:
        """Describe the driver.

        Args:
            pause_max_s: seconds that a sequence may be paused; then it is given up.
        """
        self.queue = queue
        self.schedule = schedule
        self.ends = EndCounts()
        self.steps = ServiceRate(1)
        self.items = 0
        self.is_closing = False
        self._name = name
        self._model = model
        self._pause_max_s = pause_max_s
        self._wanted = asyncio.Event()

    # --- consumers -------------------------------------------------------------------

    def add(self, generation: Generation[R, T], now_s: float) -> None:
        """Let a request wait."""
        evicted = queues.admitted(self.queue, generation.queued, now_s)
        if evicted is not None:
            self._drop(evicted, DropReason.EVICTED, now_s)
        self._wanted.set()

    def close(self) -> None:
        """Take no more requests; `work` ends after those that have come."""
        self.is_closing = True
        self._wanted.set()

    def resume(self, generation: Generation[R, T]) -> None:
        """Note that the consumer has taken an item."""
        is_paused = generation.sequence.state is SequenceState.PAUSED
        if is_paused and not generation.is_behind:
            self.schedule.on_taken(generation.sequence)
            self._wanted.set()

    def leave(self, generation: Generation[R, T]) -> None:
        """Note that the consumer has reached the end, or has gone."""
        if not generation.is_over:
            self.ends.left += 1
        generation.forget()
        self._close(generation)
        self._wanted.set()

    def cut_off(
        self, generation: Generation[R, T], deadline: Deadline
    ) -> DeadlineExceededError:
        """End a sequence whose deadline has passed; return the error."""
        if self.queue.remove(generation.queued):
            self.queue.counts.expired += 1
            error = queues.expired(deadline, self._name)
            generation.end(error)
        else:
            error = _cut_off(deadline, self._name)
            self._fail(generation, error)
        self._wanted.set()
        return error

    def _close(self, generation: Generation[R, T]) -> None:
        self.queue.remove(generation.queued)
        self.schedule.close(generation.sequence)

    def _drop(
        self,
        queued: QueuedRequest[Generation[R, T]],
        reason: DropReason,
        now_s: float,
    ) -> None:
        """Tell a request that waited why it will not run."""
        generation = queued.subject
        self.schedule.close(generation.sequence)
        error = queues.dropped(
            reason,
            deadline=generation.deadline,
            name=self._name,
            age_s=now_s - queued.came_s,
            retry_after_s=self.queue.rate.drain_s(len(self.queue.waiting), now_s),
        )
        generation.end(error)

    # --- the model -------------------------------------------------------------------

    async def work(self, thread: ModelThread) -> None:
        """Drive the model until all requests have ended, and no more will come."""
        self._thread = thread
        try:
            while True:
                self._wanted.clear()
                self._end_late()
                await self._let_leave()
                await self._let_enter()
                chosen = self.schedule.begin_step()
                if chosen:
                    await self._step(chosen)
                elif not self.schedule.has_work:
                    if self.is_closing and not self._is_busy:
                        return
                    await self._wait()
        finally:
            await self._end_all()

    @property
    def _is_busy(self) -> bool:
        return bool(self.queue.waiting) or bool(self.schedule.inside)

    async def _wait(self) -> None:
        """Wait for a request, for a consumer, or for the next due time."""
        times = [self.queue.drops_at_s]
        times += [
            self._ends_at_s(sequence.subject) for sequence in self.schedule.paused
        ]
        at_s = min((time_s for time_s in times if time_s is not None), default=None)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(at_s):
                await self._wanted.wait()

    def _ends_at_s(self, paused: Generation[R, T]) -> float:
        """Return when a paused sequence is given up."""
        given_up_s = paused.paused_s + self._pause_max_s
        if paused.deadline is None:
            return given_up_s
        return min(paused.deadline.at_s, given_up_s)

    def _end_late(self) -> None:
        """End the requests whose time is over."""
        now_s = self._now_s()
        for queued, reason in self.queue.drop_due(now_s):
            self._drop(queued, reason, now_s)
        for sequence in self.schedule.inside_now:
            generation = sequence.subject
            deadline = generation.deadline
            if deadline is not None and deadline.at_s <= now_s:
                self.cut_off(generation, deadline)
            elif (
                sequence.state is SequenceState.PAUSED
                and generation.paused_s + self._pause_max_s <= now_s
            ):
                self._fail(generation, _not_taken(self._pause_max_s))

    async def _let_leave(self) -> None:
        """Drop the states of the sequences that are over."""
        for sequence in self.schedule.leaving():
            generation = sequence.subject
            state, generation.state = generation.state, None
            self.schedule.on_left(sequence)  # first, so that `leave` is called once
            self.queue.rate.drop(generation)
            try:
                await self._thread.call(self._model.leave, state)
            except Exception:
                logger.exception("%s: a sequence could not leave", self._name)

    async def _let_enter(self) -> None:
        """Let requests enter for which there are slots and memory."""
        schedule = self.schedule
        if not self.queue.waiting or not schedule.room:
            return
        requests = self.queue.take(None, schedule.room, schedule.memory_free)
        entering = [queued.subject for queued in requests]
        now_s = self._now_s()
        for generation in entering:
            self.queue.rate.begin(generation, now_s)
            if generation.span is not None:
                waited_s = now_s - generation.queued.came_s
                generation.span.noted("asyncrpc.generation.waited_s", waited_s)
            schedule.admit(generation.sequence)
        if entering:
            await self._enter(entering)

    async def _enter(self, entering: list[Generation[R, T]]) -> None:
        requests = [generation.request for generation in entering]
        try:
            states = await self._thread.call(
                self._model.enter,
                requests,
                late=lambda late_states: self._on_entered_late(entering, late_states),
            )
            states = _answers("enter", states, len(requests))
        except Exception as error:  # noqa: BLE001  (raised in the consumers)
            if len(entering) > 1 and not isinstance(error, UsageError):
                for generation in entering:
                    await self._enter([generation])
                return
            states = [error] * len(entering)
        except BaseException:
            for generation in entering:
                if generation.state is None:  # else it has entered late
                    self._refuse(generation, queues.closed("batcher"))
            raise
        self._on_entered(entering, states)

    def _on_entered(self, entering: list[Generation[R, T]], states: Any) -> None:
        """Take the states that the model has made, or the errors in their places."""
        for generation, state in zip(entering, states, strict=True):
            if isinstance(state, BaseException):
                self._refuse(generation, settable(state))
            else:
                generation.state = state
                self.schedule.on_entered(generation.sequence)

    def _on_entered_late(self, entering: list[Generation[R, T]], states: Any) -> None:
        """Take states that a thread made after the cancellation, so that they leave."""
        with suppress(UsageError):
            self._on_entered(entering, _answers("enter", states, len(entering)))

    def _refuse(self, generation: Generation[R, T], error: BaseException) -> None:
        """Refuse a sequence that the model has made no state of."""
        self.schedule.on_refused(generation.sequence)
        self.queue.rate.drop(generation)
        self._fail(generation, error)

    async def _step(self, chosen: list[ModelSequence[Generation[R, T]]]) -> None:
        states = [sequence.subject.state for sequence in chosen]
        items = 0
        self.steps.begin(chosen_step := object(), self._now_s())
        try:
            steps = await self._thread.call(self._model.step, states)
            steps = _answers("step", steps, len(states))
        except Exception as error:  # noqa: BLE001  (raised in the consumers)
            steps = [error] * len(states)
        except BaseException:
            self.steps.drop(chosen_step)
            for sequence in chosen:  # the items of this step are lost
                self.schedule.on_stepped(sequence, is_last=True, is_behind=False)
            raise
        for sequence, step in zip(chosen, steps, strict=True):
            items += self._on_stepped(sequence, step)
        self.items += items
        self.steps.end(chosen_step, items, self._now_s())

    def _on_stepped(self, sequence: ModelSequence[Generation[R, T]], step: Any) -> int:
        """Hand over the items of a step for one sequence; return their number."""
        generation, error = sequence.subject, None
        items: list[T] = []
        is_last = True
        if isinstance(step, BaseException):
            error = settable(step)
        else:
            try:
                items, is_last = _read_step(step)
            except UsageError as wrong_step:
                error = wrong_step
        if not generation.is_over:
            generation.put(items)
        is_behind = generation.is_behind
        if is_behind:
            generation.paused_s = self._now_s()
        self.schedule.on_stepped(sequence, is_last=is_last, is_behind=is_behind)
        if error is not None:
            self._fail(generation, error)
        elif is_last:
            self._answered(generation)
        return len(items)

    async def rehearse(self, requests: list[R], thread: ModelThread) -> None:
        """Run requests before all others, and drop their items."""
        states = await thread.call(self._model.enter, requests)
        states = _answers("enter", states, len(requests))
        for state in states:
            if isinstance(state, BaseException):
                raise state
        active = list(states)
        try:
            for _ in range(WARM_UP_STEPS_MAX):
                if not active:
                    break
                steps = await thread.call(self._model.step, active)
                steps = _answers("step", steps, len(active))
                active = [
                    state
                    for state, step in zip(active, steps, strict=True)
                    if not _read_step(step)[1]
                ]
        finally:
            for state in states:
                await thread.call(self._model.leave, state)

    # --- ends ------------------------------------------------------------------------

    def _answered(self, generation: Generation[R, T]) -> None:
        if not generation.is_over:
            self.ends.answered += 1
            self.queue.rate.end(generation, 1, self._now_s())
            generation.end()

    def _fail(self, generation: Generation[R, T], error: BaseException) -> None:
        if not generation.is_over:
            self.ends.failed += 1
            generation.end(error)
        self._close(generation)

    async def _end_all(self) -> None:
        """End the remaining sequences, after the block of the batcher has raised."""
        self.is_closing = True
        for queued in tuple(self.queue.waiting):
            self._fail(queued.subject, queues.closed("batcher"))
        for sequence in self.schedule.inside_now:
            error = queues.closed("batcher", Outcome.UNKNOWN)
            self._fail(sequence.subject, error)
        await self._let_leave()

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _answers(function: str, answers: Any, count: int) -> list[Any]:
    """Return the answers of a model's function, one for each sequence."""
    return checked_answers(f"the model's `{function}`", answers, count, "sequences")


def _read_step(step: Any) -> tuple[list[Any], bool]:
    """Return the items of a step, and whether it was the last one."""
    if isinstance(step, BaseException):
        raise step
    is_pair = isinstance(step, tuple | list) and len(step) == 2  # noqa: PLR2004
    items: Any
    items, is_last = step if is_pair else (None, True)
    if isinstance(items, str | bytes | bytearray | Mapping | AbstractSet):
        raise UsageError(
            "the model's `step` must return for each sequence a list of its items,"
            " also of a single one, and whether it was its last step; an object of type"
            f" {type(items).__name__} is not a list"
        )
    try:
        return list(items), bool(is_last)
    except (TypeError, ValueError) as error:
        raise UsageError(
            "the model's `step` must return for each sequence its items and whether it "
            f"was its last step, not an object of type {type(step).__name__}"
        ) from error


def _cut_off(deadline: Deadline, name: str) -> DeadlineExceededError:
    return DeadlineExceededError(
        function=name, to="", outcome=Outcome.UNKNOWN, timeout_s=deadline.allowed_s
    )


def _not_taken(pause_max_s: float) -> RejectedError:
    return RejectedError(
        f"no item was taken for {pause_max_s:g} s (pause_max_s), so the sequence was "
        "given up",
        outcome=Outcome.EXECUTED,
    )
