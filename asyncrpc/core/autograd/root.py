"""The worker that begins a backward pass: it has the roots, and decides its end.

Gradients go out with the request to take part, as soon as no other tensor sent in the
context can still add to them; so a pass takes one message for each step of the way.
Where that is not known yet, a worker is first asked only to find out which others take
part, and gets the gradient later.  Once all is quiet the root knows which workers take
part; a worker that still waits to learn that is told (`close`).

1.  `advance`: the tensors whose gradients come now, and those whose will come later.
2.  `close`: no further workers take part.  Often not needed.
3.  `commit` or `abort`: gradients of parameters enter the context, or are dropped.

Each crossing that takes part gets exactly one gradient (or a message that there is
none), the others get nothing: an unused result costs nothing, and nothing waits for
it.  FAST skips the question: everything that was sent is expected to take part, as in
torch; if something does not, the pass fails, and names what it waits for.

How `backward` reports an error that ended its pass, on any worker.

A hook's error may describe itself wrongly, or raise when it is inspected: so it is
judged by its type alone.

Source: pytorch/pytorch#23110 describes the exact ("SMART") mode and its difficulty.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from asyncrpc.core.autograd.contexts import Contexts, PassEnds
from asyncrpc.core.autograd.engine import Keeping, root_gradients
from asyncrpc.core.autograd.functions import CrossingId, edge_of
from asyncrpc.core.autograd.messages import PassId, PassIds
from asyncrpc.core.autograd.state import Pass, StepAfterPass, VotesWithPass
from asyncrpc.core.autograd.waits import PassWaits
from asyncrpc.core.autograd.work import PassWork, on_devices_of
from asyncrpc.core.calls.futures import task_here
from asyncrpc.core.ids import ContextId, Incarnation, MessageId, WorkerId
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.parts import Parts
from asyncrpc.core.serde import words_of
from asyncrpc.core.torch_modes import with_defaults
from asyncrpc.errors import (
    AutogradError,
    BackwardFailedError,
    BackwardTimeoutError,
    CallError,
    RemoteError,
)


def is_reported(error: BaseException) -> bool:
    """Return whether `backward` reports an error in its own words.

    It does not for errors that end a program or a task; nor for ours, if they arose
    here.
    """
    kind = type(error)
    is_ours = issubclass(kind, AutogradError) and not issubclass(kind, RemoteError)
    return issubclass(kind, Exception) and not is_ours


def failed(
    name: str, context_id: ContextId, error: BaseException
) -> BackwardFailedError:
    """Return the error that `backward` raises in place of another."""
    worker, text, kind = name, words_of(error), type(error)
    original: Any = error
    if issubclass(kind, RemoteError) and "worker" in original.__dict__:
        worker = original.worker
        text = f"{original.remote_type}: {original.remote_message}"
    elif issubclass(kind, CallError):  # the worker is lost, or did not answer
        worker = original.to or worker
    return BackwardFailedError(
        f"Error on worker {worker!r}: {text}",
        worker=worker,
        context_id=str(context_id),
    )


class RootPasses:
    """The passes that this worker begins."""

    def __init__(
        self,
        me: WorkerId,
        contexts: Contexts,
        worker: Parts,
        *,
        work: PassWork,
        ends: PassEnds,
        waits: PassWaits,
    ) -> None:
        self._me = me
        self._contexts = contexts
        self._worker = worker
        self._work = work
        self._ends = ends
        self._waits = waits

    async def backward(
        self,
        context_id: ContextId,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None] | None,
        keeping: Keeping,
        deadline: Deadline | None,
        *,
        is_fast: bool,
        step: StepAfterPass | VotesWithPass | None = None,
    ) -> None:
        """Run a pass from local roots; see `asyncrpc.autograd.backward`.

        A step goes with the last gradients, if they are for its owner; or the workers
        vote on it.
        """
        state = self._contexts.state(context_id)
        check = partial(root_gradients, roots, gradients)
        begin_with = [gradient for gradient in gradients or () if gradient is not None]
        start_gradients = await on_devices_of(
            self._worker, [*roots, *begin_with], check
        )
        pass_id = PassId(self._me.incarnation, self._contexts.next_serial())
        ids = PassIds(context_id, pass_id)
        backward_pass = state.join_pass(pass_id, self._me.name, keeping)
        self._ends.note_begun(backward_pass)
        if isinstance(step, VotesWithPass):
            backward_pass.votes_on = step.serial
        else:
            backward_pass.step = step
        backward_pass.task = task_here(asyncio.get_running_loop())
        backward_pass.variables = contextvars.copy_context()
        limit = None if deadline is None else asyncio.timeout_at(deadline.at_s)
        try:
            _add_roots(backward_pass, roots, start_gradients, is_fast=is_fast)
            if limit is None:  # entering a timeout that never expires takes 3 us
                await self._run(backward_pass)
            else:
                async with limit:
                    await self._run(backward_pass)
            if backward_pass.wave.unfinished:
                await self._raise_stuck(backward_pass)
        except BaseException as error:
            is_late = limit is not None and limit.expired()
            try:  # the task that asks what the pass waits for can be cancelled
                waits = (
                    "; ".join(await self._waits.explain(backward_pass, []))
                    if is_late
                    else ""
                )
            finally:
                self._ends.finish(ids, commit=False)
            if deadline is not None and is_late:
                raise BackwardTimeoutError(
                    f"the pass took more than {deadline.allowed_s:g} s: {waits}",
                    worker=self._me.name,
                    context_id=str(context_id),
                ) from error
            if not is_reported(error):
                raise
            raise failed(self._me.name, context_id, error) from error
        self._ends.finish(ids, commit=True)
        if isinstance(step, VotesWithPass):
            reports = backward_pass.wave.reports.values()
            step.are_sure = {
                report.worker: report.is_sure
                for report in reports
                if report.is_sure is not None
            }

    async def _run(self, backward_pass: Pass) -> None:
        """Run a pass until no part of it can go on."""
        await self._work.work(backward_pass)
        if backward_pass.wave.unfinished and not backward_pass.is_fast:
            await self._work.close(backward_pass)

    async def _raise_stuck(self, backward_pass: Pass) -> None:
        """Raise the error of a pass that still waits when no message is under way."""
        text = "; ".join(await self._waits.explain(backward_pass, []))
        if backward_pass.is_fast:
            text += (
                ". FAST assumes that the roots use every tensor that was sent in the "
                "context; use mode='smart'"
            )
        raise AutogradError(text)


@with_defaults
def _add_roots(
    backward_pass: Pass,
    roots: Sequence[torch.Tensor],
    start_gradients: Sequence[torch.Tensor],
    *,
    is_fast: bool,
) -> None:
    """Make the roots starts, under ids that differ from those of all messages."""
    message = MessageId(Incarnation(0), 0)
    crossings = [CrossingId(message, index) for index in range(len(roots))]
    for crossing, root in zip(crossings, roots, strict=True):
        edge = backward_pass.edges[crossing] = edge_of(root)
        backward_pass.machine.add_root(crossing, edge.node)
    backward_pass.is_fast = is_fast
    also = (
        backward_pass.machine.want(backward_pass.machine.unsettled) if is_fast else []
    )
    backward_pass.take_part([*crossings, *also])
    backward_pass.enter(dict(zip(crossings, start_gradients, strict=True)))
