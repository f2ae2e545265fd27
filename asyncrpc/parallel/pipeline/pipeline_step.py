"""One step of a pipeline, as its driver sees it: start, feed, commit; or fail whole.

The driver calls `run` on every stage and hands the micro-batches to the first and their
targets to the last, a few ahead of their use.  When the first stage has run its last
backward pass, all others have run theirs: then the driver tells all to commit.

A failure or a cancellation before that ends the calls of `run`, and with them all state
of the stages.  The first error is raised.  One error may arrive on several ways, since
a stage that fails makes the stages before it fail: each copy has the same type and
text, and the name of the worker where it arose.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.rref.handle import RRef
from asyncrpc.parallel.pipeline.schedules import OUTPUTS_AHEAD
from asyncrpc.parallel.pipeline.stage import Stage
from asyncrpc.parallel.pipeline.stage_run import StageAnswer


class PipelineStep:
    """One batch on its way through the stages."""

    def __init__(
        self,
        stages: Sequence[RRef[Stage]],
        number: int,
        inputs: Sequence[Any],
        targets: Sequence[Any] = (),
    ) -> None:
        self._stages = [stage.rpc_async() for stage in stages]
        self._number = number
        self._inputs = inputs
        self._targets = targets

    async def run(
        self, plans: Sequence[Sequence[Any]], **aim: Any
    ) -> list[StageAnswer]:
        """Carry out the step."""
        try:
            async with asyncio.TaskGroup() as tasks:
                runs = [
                    tasks.create_task(_answer(stage.run, list(plan), **own))
                    for stage, plan, own in zip(
                        self._stages,
                        plans,
                        [*[{}] * (len(plans) - 1), aim],
                        strict=True,
                    )
                ]
                tasks.create_task(self._feed())
                if self._targets:
                    await self._stages[0].computed(self._number)
                    await self._commit()
            return [StageAnswer(*run.result()) for run in runs]
        except BaseExceptionGroup as group:
            failure = group.exceptions[0]
        try:
            raise failure
        finally:
            del failure  # or this frame, and with it the batch, would keep itself

    async def _commit(self) -> None:
        """Tell all stages to commit, at once: all of them commit, or none."""
        calls = [stage.commit(self._number) for stage in self._stages]
        await asyncio.shield(asyncio.gather(*calls))

    async def _feed(self) -> None:
        """Send the micro-batches, each when the one two before it is in use.

        The target of each has arrived before its input is sent: so inputs that wait for
        targets never take the room that the targets need.
        """
        first, last, number = self._stages[0], self._stages[-1], self._number
        taking: deque[CallFuture[Any]] = deque()
        aiming: deque[CallFuture[Any]] = deque()
        targets = enumerate(self._targets)
        try:
            for chunk, value in enumerate(self._inputs):
                for at, target in islice(targets, OUTPUTS_AHEAD - len(aiming)):
                    aiming.append(last.target(number, at, target))
                if aiming:
                    await aiming.popleft()
                if len(taking) == OUTPUTS_AHEAD:
                    await taking.popleft()
                taking.append(first.take(number, chunk, value, []))
            while taking:
                await taking.popleft()
        finally:
            _drop((*taking, *aiming))


async def _answer(
    method: Callable[..., CallFuture[Any]], *args: Any, **kwargs: Any
) -> Any:
    """Call a method of a stage, in the task that waits for it."""
    return await method(*args, **kwargs)


async def together(calls: Sequence[CallFuture[Any]]) -> list[Any]:
    """Await calls; if one fails, cancel the others."""
    try:
        return await asyncio.gather(*calls)
    except BaseException:
        _drop(calls)
        raise


def _drop(calls: Iterable[CallFuture[Any]]) -> None:
    """Cancel calls; the error of one that has failed already is known elsewhere."""
    for call in calls:
        if not call.cancel() and not call.cancelled():
            call.exception()
