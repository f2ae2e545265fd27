"""Sequences that a model generates together; each enters and leaves between two steps.

`sequence_driver` drives the model.

Source: see `machine.sequences`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from asyncrpc.core.arguments import check_choice, check_count, check_flag
from asyncrpc.core.calls.tracing import generation_trace
from asyncrpc.core.loop.loops import loop_for
from asyncrpc.errors import (
    UsageError,
)
from asyncrpc.serving.batching.generation import END, Generation
from asyncrpc.serving.batching.machine.fair_queue import QueuedRequest
from asyncrpc.serving.batching.machine.overload import (
    QueueLimits,
    ServiceQueue,
)
from asyncrpc.serving.batching.machine.sequences import (
    SequenceLimits,
    SequenceSchedule,
)
from asyncrpc.serving.batching.model_thread import ModelThread
from asyncrpc.serving.batching.queues import (
    OVERFLOWS,
    PRIORITY_STEP_S,
    WAITING_MAX,
    Overflow,
    batches_of,
    check_age,
    check_model,
    check_queue,
    check_request,
    checked_callable,
    chosen_name,
    deadline_here,
    entered_loop,
    tracer_in,
)
from asyncrpc.serving.batching.sequence_driver import SequenceDriver
from asyncrpc.serving.batching.sequence_model import SequenceModel
from asyncrpc.serving.batching.statistics import (
    GenerationStats,
    figures_of,
    show,
    stats_of,
)

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

ITEMS_MAX: Final = 16  # one a step: a short delay of the loop does not stop the model
PAUSE_MAX_S: Final = 60.0  # longer than a slow network takes; then memory is freed


class ContinuousBatcher(Generic[R, S, T]):
    """A model that generates several sequences at once, one step at a time.

    An asynchronous context manager, on the worker that has the model.  A request enters
    as soon as there is a slot and memory, between two steps of the others, and leaves
    when it is over, or when its consumer goes.  The model's functions run in the
    context in which the batcher was entered.

    Memory is reserved for the greatest length that a sequence can have, so no sequence
    is ever evicted for another.  A consumer that does not take its items pauses its own
    sequence, which keeps its memory and gives up its slot.

    Example:
        >>> async with ContinuousBatcher(Model(), slots=16) as batcher:
        ...     async with aclosing(batcher.generate(prompt)) as tokens:
        ...         async for token in tokens:
        ...             print(token)
    """

    def __init__(
        self,
        model: SequenceModel[R, S, T],
        slots: int,
        *,
        memory_max: int | None = None,
        memory_of: Callable[[R], int] | None = None,
        inside_max: int | None = None,
        entering_max: int | None = None,
        items_max: int = ITEMS_MAX,
        pause_max_s: float = PAUSE_MAX_S,
        waiting_max: int = WAITING_MAX,
        max_queue_age_s: float | None = None,
        standing_queue_age_s: float | None = None,
        overflow: Overflow = "newest",
        priority_step_s: float = PRIORITY_STEP_S,
        warm_up: Sequence[Sequence[R]] = (),
        in_thread: bool = True,
        name: str | None = None,
    ) -> None:
        """Describe a batcher; `async with` starts it.

        Args:
            model: makes the steps; see `SequenceModel`.
            slots: sequences in a step.
            memory_max: of all sequences whose state the model has, in the unit of
                `memory_of`, such as tokens in its cache; None: no limit.
            memory_of: returns the most memory that the sequence of a request can take:
                for a language model, the tokens of the prompt and all that may follow.
            inside_max: sequences whose state the model has, including paused ones;
                None: twice the slots.
            entering_max: sequences that enter between two steps, while the others wait;
                None: as many as there are slots.
            items_max: items of a sequence that may wait for its consumer; with this
                many, it is paused.
            pause_max_s: seconds that a sequence may be paused; then it is given up, and
                its consumer gets a `RejectedError`.
            waiting_max: requests that may wait; more are rejected, or replace requests
                of a lower priority, or of the client with the most requests.
            max_queue_age_s: seconds that a request may wait in total; one that would
                wait longer, by the measured rate, is rejected.  None: no limit.
            standing_queue_age_s: the same limit while the queue has not been empty for
                `max_queue_age_s`.
            overflow: which request is rejected when too many wait: the "newest" one,
                at once, or the "oldest" one, of the client with the most requests, so
                that the served requests have waited the least.
            priority_step_s: seconds of head start that each step of priority gives.
            warm_up: requests that are run before any other, those of one inner list
                together, for 32 steps or until they end.
            in_thread: whether plain functions of the model run in a thread; otherwise
                they block the event loop.
            name: in errors and metrics; by default that of the model's class.

        Raises:
            UsageError: an argument has the wrong type, or is out of range.
        """
        check_model(model)
        check_count("slots", slots, at_least=1)
        checked_callable("memory_of", memory_of)
        if (memory_max is None) is not (memory_of is None):
            raise UsageError("memory_max and memory_of must be given together")
        if memory_max is not None:
            check_count("memory_max", memory_max, at_least=1)
        if inside_max is not None:
            check_count("inside_max", inside_max, at_least=slots)
        if entering_max is not None:
            check_count("entering_max", entering_max, at_least=1)
        check_count("items_max", items_max, at_least=1)
        check_age("pause_max_s", pause_max_s)
        check_queue(waiting_max, max_queue_age_s, standing_queue_age_s, priority_step_s)
        check_choice("overflow", overflow, OVERFLOWS)
        check_flag("in_thread", in_thread)
        self._memory_max = memory_max
        self._memory_of = memory_of
        self._items_max = items_max
        self._warm_up = batches_of("warm_up", warm_up, slots)
        self._runs_in_thread = in_thread
        self._name = chosen_name(name, type(model))
        self._driver: SequenceDriver[R, S, T] = SequenceDriver(
            self._name,
            model,
            ServiceQueue(
                QueueLimits(
                    waiting_max=waiting_max,
                    places=slots,
                    turn_max=1,
                    max_age_s=max_queue_age_s,
                    standing_age_s=standing_queue_age_s,
                    priority_step_s=priority_step_s,
                    evicts_oldest=overflow == "oldest",
                    whole_turns=False,
                )
            ),
            SequenceSchedule(
                SequenceLimits(
                    slots=slots,
                    inside_max=2 * slots if inside_max is None else inside_max,
                    entering_max=slots if entering_max is None else entering_max,
                    memory_max=memory_max,
                )
            ),
            pause_max_s=pause_max_s,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._context = contextvars.Context()  # in which it is entered

    async def __aenter__(self) -> Self:
        """Warm up, then be ready for requests on this loop.

        Raises:
            UsageError: no event loop runs here, or the batcher was entered before.
            Exception: what the model raised while it was warmed up.

        Cancellation:
            The batcher is not entered.
        """
        loop = loop_for("a ContinuousBatcher")
        if self._task is not None:
            raise UsageError("a ContinuousBatcher is entered once; make another one")
        context = contextvars.copy_context()
        self._thread = ModelThread(
            self._name, loop, context, in_thread=self._runs_in_thread
        )
        try:
            for requests in self._warm_up:
                await self._driver.rehearse(requests, self._thread)
        except BaseException:
            await self._thread.close()
            raise
        self._loop = loop
        self._context = context
        work = self._driver.work(self._thread)
        self._task = loop.create_task(work, context=context)
        self._hide = show(self._name, lambda: figures_of(self.stats()), context)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish all requests, and take no more; if the block raised, abort.

        Raises:
            UsageError: it was entered on another event loop; it stays open.

        Cancellation:
            All sequences leave, and their consumers get a `RejectedError`.
        """
        entered_loop("ContinuousBatcher", self._loop, is_closing=False)
        assert self._task is not None  # it has been entered
        self._driver.close()
        try:
            if error is None:
                await asyncio.wait([self._task])  # `pause_max_s` and the model end it
        finally:
            self._hide()
            self._task.cancel()
            await asyncio.wait([self._task])
            await self._thread.close()

    async def generate(
        self, request: R, *, priority: int = 0, client: Hashable = None
    ) -> AsyncGenerator[T, None]:
        """Yield the items of one sequence.

        Close the generator (`contextlib.aclosing`) if a loop over it may be left early:
        the sequence then leaves before the next step.  A remote stream does so itself.

        Args:
            request: the argument of the model's `enter`.
            priority: a higher one enters sooner: each step is a head start of
                `priority_step_s`.
            client: the owner of the request; clients of one priority have equal shares.

        Yields:
            The items, in order.

        Raises:
            OverloadedError: too many requests wait, or this one would wait or has
                waited too long; its `retry_after_s` says when there should be room.
            DeadlineExceededError: the deadline passed.
            RejectedError: the batcher is closed, or the items were not taken for
                `pause_max_s`.
            UsageError: an argument has the wrong type, or the sequence takes more than
                `memory_max`; or the batcher was entered on another event loop; or the
                model returned something else than a `SequenceModel` must.
            NotStartedError: the batcher has not been entered.
            Exception: what the model raised, or returned for this sequence.

        Cancellation:
            The sequence leaves before the next step.
        """
        with generation_trace(tracer_in(self._context), self._name) as trace:
            generation = self._join(request, priority, client)
            if trace is not None:
                generation.span = trace.span
                trace.count = lambda: generation.consumed
            try:
                while (item := await self._take(generation)) is not END:
                    self._driver.resume(generation)
                    if generation.consumed == 1:
                        self._note_first(generation)
                    yield item
            finally:
                self._driver.leave(generation)

    def stats(self) -> GenerationStats:
        """Return what waits, what runs, and what has happened so far.

        Thread safety: from any thread, but the figures may be of different moments.
        """
        driver = self._driver
        schedule, steps = driver.schedule, driver.steps
        now_s = 0.0 if self._loop is None else self._loop.time()
        return GenerationStats(
            requests=stats_of(driver.queue, driver.ends, schedule.inside, now_s),
            paused=len(schedule.paused),
            memory_held=schedule.memory_held,
            steps=steps.ended,
            step_s=steps.turn_s,
            items=driver.items,
            items_per_s=steps.per_s(),
        )

    # --- consumers -------------------------------------------------------------------

    def _join(self, request: R, priority: int, client: Hashable) -> Generation[R, T]:
        loop = entered_loop(
            "ContinuousBatcher", self._loop, is_closing=self._driver.is_closing
        )
        check_request(priority, client)
        now_s = loop.time()
        deadline = deadline_here(self._driver.queue, self._name, now_s)
        memory = self._memory(request)
        generation = Generation[R, T](
            request, deadline, memory=memory, items_max=self._items_max
        )
        generation.queued = QueuedRequest(
            generation,
            now_s,
            deadline_s=None if deadline is None else deadline.at_s,
            priority=priority,
            client=client,
            size=memory,
        )
        self._driver.add(generation, now_s)
        return generation

    async def _take(self, generation: Generation[R, T]) -> Any:
        """Return the next item, or `END`, before the deadline."""
        deadline = generation.deadline
        if deadline is None:
            return await generation.take()
        try:
            async with asyncio.timeout_at(deadline.at_s) as scope:
                return await generation.take()
        except TimeoutError:
            if not scope.expired():  # the error is the model's own
                raise
        raise self._driver.cut_off(generation, deadline)

    @staticmethod
    def _note_first(generation: Generation[R, T]) -> None:
        if generation.span is not None:
            now_s = asyncio.get_running_loop().time()
            first_s = now_s - generation.queued.came_s
            generation.span.noted("asyncrpc.generation.first_item_s", first_s)

    def _memory(self, request: R) -> int:
        """Return the most memory that the sequence of a request takes."""
        if self._memory_of is None or self._memory_max is None:
            return 0
        memory = self._memory_of(request)
        check_count("the memory of a sequence, as memory_of returns it,", memory)
        if memory > self._memory_max:
            raise UsageError(
                f"a sequence that takes up to {memory} of memory never fits: the model "
                f"has {self._memory_max} (memory_max)"
            )
        return memory
