"""The collectives of one backward pass, in the same order at every rank.

    buffers     those of one rank, packed; they are put in place when the pass is over
    buckets     reduced one after the other, each as soon as it is full
        used        how many ranks have used each parameter, if that is needed
        order       of the gradients at one rank, if the buckets will be rebuilt
    order       in which gradients came, at one rank, if the buckets are to be rebuilt

Communication hooks run here as well, one at a time: ranks match collectives by their
order, so concurrent hooks that reduce more than once could mix up their collectives.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from asyncrpc.core.calls.foreign_futures import when_done
from asyncrpc.core.calls.futures import task_here
from asyncrpc.core.serde import text_of, words_of
from asyncrpc.core.torch_modes import alone, plain_steps
from asyncrpc.errors import CollectiveError, UsageError
from asyncrpc.extend import does
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.collectives.matching import group_label
from asyncrpc.parallel.ddp.bucket import GradBucket
from asyncrpc.parallel.ddp.buffers import Buffers
from asyncrpc.parallel.ddp.hooks.states import bound
from asyncrpc.parallel.ddp.passes import Backward, PassConfig
from asyncrpc.parallel.ddp.recreatable_group import RecreatableGroup
from asyncrpc.parallel.ddp.threads import run_beside

# `async def hook(state, bucket) -> Tensor`, or one of torch's, which returns a
# torch.futures.Future, and annotates its bucket with another class.
Hook: TypeAlias = Callable[[Any, Any], Any]
T = TypeVar("T")


class Exchange:
    """The collectives of one rank for a module.

    Attributes:
        group: the ranks, for this module alone; replaced after a failure.
        buffers: of the module; all ranks take them from one rank.  None: they do not.
        hook: reduces a bucket; None: the mean over all ranks.
        join: asks before each pass which ranks have an input; None: all have one.
        divides_by_all: the mean is over all ranks, not only those that have an input.
    """

    def __init__(
        self,
        base: Group,
        parameters: Sequence[torch.Tensor],
        buffers: Buffers | None,
        nbytes: int,
    ) -> None:
        self.parameters = parameters
        self.buffers = buffers
        self.hook: Hook | None = None
        self._state: object = None  # as registered
        self._bound: Any = None  # as the hook gets it
        self.join: Callable[[], Awaitable[Sequence[int]]] | None = None
        self.divides_by_all = True
        self.nbytes = nbytes
        self._memory: torch.Tensor | None = None
        self._own = RecreatableGroup(base)
        self.group = self._own.enter()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that everything runs on."""
        return self.group.host.loop

    def set_hook(self, state: object, hook: Hook) -> None:
        """Let a hook reduce the buckets."""
        self.hook, self._state = hook, state
        self._bind()

    def _bind(self) -> None:
        self._bound = bound(self._state, self.group, self.parameters)
        if self._state is None and _is_torchs(self.hook):
            self._bound = None  # which means the default group of torch to it

    def hand_hook_to(self, other: Exchange) -> None:
        """Let another exchange reduce the buckets by the same hook."""
        if self.hook is not None:
            other.set_hook(self._state, self.hook)

    # --- meeting the other ranks -----------------------------------------------------

    @property
    def terms(self) -> PassConfig | None:
        """Return the next pass's configuration; None if ranks must agree on it."""
        if self._memory is None or self.join is not None:
            return None
        return self._terms(self._memory, range(self.group.size))

    def meet(self) -> Group:
        """Return the group, which is a new one after a failure."""
        group = self._own.enter()
        if group is not self.group:
            self.group = group
            if self.hook is not None:
                self._bind()
        return group

    async def enter(self) -> PassConfig:
        """Agree with the others on the terms of the next pass."""
        self.meet()
        try:
            present: Sequence[int] = range(self.group.size)
            if self.join is not None:
                present = await self.join()
            if self._memory is None or self._memory.nbytes != self.nbytes:
                self._memory = await self.group.empty(self.nbytes, dtype=torch.uint8)
        except BaseException:
            self.leave()
            raise
        return self._terms(self._memory, present)

    def _terms(self, memory: torch.Tensor, present: Sequence[int]) -> PassConfig:
        ranks = self.group.size if self.divides_by_all else max(1, len(present))
        scale = 1 / ranks if self.hook is None else 1.0
        is_alone = self.group.size == 1 and self.hook is None
        return PassConfig(memory, scale, present, is_alone)

    def forget_memory(self) -> None:
        """Let the next pass have other memory, as at every rank."""
        self._memory = None

    def leave(self) -> None:
        """Give up the group and the memory; the next `enter` makes new ones."""
        self._memory = None
        self._own.leave("")

    def close(self) -> None:
        """Leave for good; called on the loop.  Idempotent."""
        self._memory = None
        self._own.close()

    # --- one pass --------------------------------------------------------------------

    def start(self, current: Backward) -> None:
        """Run a pass in a task; from any thread."""
        self.loop.call_soon_threadsafe(self._start, current)

    def _start(self, current: Backward) -> None:
        try:
            task = self.group.host.start_task(self.run(current))
        except BaseException as error:  # noqa: BLE001  (the thread of the pass raises it)
            current.end(error)
            return
        current.task = task
        # A task that is cancelled before it begins does not even end the pass.
        task.add_done_callback(lambda _: self._end(current))

    def _end(self, current: Backward) -> None:
        if not current.is_ended:
            self.refuse("gave up its backward pass")
            current.end(CollectiveError("this backward pass has been given up"))

    @does(lambda at: group_label(at["self"].group.path))
    @plain_steps
    async def run(self, current: Backward) -> None:
        """Reduce what a pass gathers; `current` ends, whatever happens."""
        error: BaseException | None = None
        try:
            await self._run(current)
        except asyncio.CancelledError:
            text = "" if current.error is None else text_of(current.error)
            self.refuse(f"gave up its backward pass{text and f': {text}'}")
            # This counts unless the pass was given up.
            error = CollectiveError(
                "the worker has ended, or the hook cancelled its task"
            )
            raise
        except BaseException as problem:  # noqa: BLE001  (the thread of the pass raises it)
            # All ranks know of a collective of this group that has failed; but a hook
            # may have been in one of another group.
            if self.hook is not None or not issubclass(type(problem), CollectiveError):
                self.refuse(f"failed in its communication hook: {words_of(problem)}")
            error = problem
        finally:
            current.end(error)

    async def _run(self, current: Backward) -> None:
        with current.communicating():
            buffers = await self._send_buffers(current.terms.root)
        for bucket in range(len(current.results)):
            await current.wait_full(bucket)
            began_s = self.group.host.recorder.now_s()
            with current.communicating():
                current.results[bucket] = await self._reduce(current, bucket)
            self._note_reduced(bucket, began_s, current.results[bucket])
        await current.wait_over()
        with current.communicating():
            if current.used is not None:
                await self.group.all_reduce(current.used)
            if current.wants_order:
                await self._send_order(current)
        await self._put_buffers(buffers, current)

    def refuse(self, reason: str) -> None:
        """Fail the collective that the others wait in: this rank cannot go on."""
        # The group may have failed before, and the others know; or its worker may have
        # ended.
        with contextlib.suppress(CollectiveError, UsageError):
            self.group.refuse(reason)

    def _note_reduced(
        self, bucket: int, began_s: float, reduced: torch.Tensor | None
    ) -> None:
        recorder = self.group.host.recorder
        nbytes = 0 if reduced is None or reduced.is_sparse else reduced.nbytes
        task = task_here(self.loop)
        recorder.buckets.record((recorder.now_s(), began_s, bucket, nbytes, task))

    # --- buckets ---------------------------------------------------------------------

    async def _reduce(self, current: Backward, bucket: int) -> torch.Tensor:
        flat = current.buckets.flats[bucket]
        if flat is None:
            return await self._reduce_sparse(current, bucket)
        if self.hook is None:
            return await self.group.all_reduce(flat)
        numbers = current.buckets.numbers[bucket]
        grad_bucket = GradBucket(
            bucket,
            flat,
            [self.parameters[number] for number in numbers],
            is_last=bucket == len(current.results) - 1,
        )
        result = await self._called(self.hook, grad_bucket)
        if not isinstance(result, torch.Tensor) or result.numel() != flat.numel():
            what_came = (
                f"a tensor of shape {tuple(result.shape)}"
                if isinstance(result, torch.Tensor)
                else f"a {type(result).__name__}"
            )
            raise UsageError(
                f"the communication hook returned {what_came} for a bucket of "
                f"{flat.numel()} elements; it must return the reduced tensor, flat"
            )
        if result.data_ptr() != flat.data_ptr():
            copy = functools.partial(flat.copy_, result.detach().view(-1))
            await run_beside(copy, flat.nbytes)
        return flat

    async def _called(self, hook: Hook, bucket: GradBucket) -> Any:
        """Run a hook; a cancellation that it causes itself does not count as ours."""
        task = asyncio.current_task()
        try:
            return await self._call(hook, bucket)
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling():
                raise
            raise CollectiveError(
                "the communication hook raised a CancelledError, but the backward pass "
                "was not cancelled; perhaps something that the hook awaited was"
            ) from error

    async def _call(self, hook: Hook, bucket: GradBucket) -> Any:
        """Run a hook of ours, or one for torch's module."""
        if is_coroutine_hook(hook):
            return await alone(hook(self._bound, bucket))
        # It may compute, or wait, for as long as it likes.
        run = self.group.host.run_in_thread
        result = await run(lambda: hook(self._bound, bucket))
        if inspect.isawaitable(result):
            result = await result
        # `then` returns an object of the base class of torch.futures.Future.
        if isinstance(result, torch._C.Future):  # noqa: SLF001
            # Only the hook that made it ends it, not the group.
            result = await when_done(result, result.value)
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]  # as some of torch's hooks give it
        return result

    async def _reduce_sparse(self, current: Backward, bucket: int) -> torch.Tensor:
        """Add up sparse gradients, which have other elements at every rank."""
        (number,) = current.buckets.numbers[bucket]
        mine = current.sparse.pop(number)
        indices = await self.group.all_gather(mine.indices())
        values = await self.group.all_gather(mine.values())
        # In the order of ranks, so that the sums are the same everywhere.
        whole = torch.sparse_coo_tensor(
            torch.cat(indices, 1),
            torch.cat(values),
            mine.shape,
            check_invariants=True,
            device=mine.device,
        )
        return whole.coalesce()

    # --- what all take from one ------------------------------------------------------

    async def _send_buffers(self, root: int) -> torch.Tensor | None:
        if self.buffers is None:
            return None
        if self.group.rank == root:
            await self._computed(self.buffers.put_late)
        mine = await self._computed(self.buffers.packed)
        packed = await self.group.broadcast(mine, root)
        return None if self.group.rank == root else packed

    async def _put_buffers(
        self, packed: torch.Tensor | None, current: Backward
    ) -> None:
        buffers, keeps_graph = self.buffers, current.keeps_graph
        if buffers is not None and packed is not None:
            await self._computed(lambda: buffers.put(packed, keeps_graph=keeps_graph))

    async def _computed(self, job: Callable[[], T]) -> T:
        """Do something to the buffers, in a thread if they are on a device."""
        assert self.buffers is not None
        if all(buffer.is_cpu for buffer in self.buffers.now()):
            return job()
        return await self.group.host.run_in_thread(job)

    async def _send_order(self, current: Backward) -> None:
        count = len(self.parameters)
        order = torch.zeros(count, dtype=torch.int64, device="cpu")
        if self.group.rank == current.terms.root:
            came = current.readiness.order
            rest = set(range(count)) - set(came)
            order = torch.tensor([*came, *sorted(rest, reverse=True)], device="cpu")
        await self.group.broadcast(order, current.terms.root)
        current.order = order.tolist()


def is_coroutine_hook(hook: Hook) -> bool:
    """Return whether a hook is a coroutine function."""
    call = type(hook).__call__  # of an object that is called like a function
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(call)


def _is_torchs(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
