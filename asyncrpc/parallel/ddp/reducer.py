"""Backward passes of one module, whose gradients are reduced while autograd runs.

Autograd reports when a gradient is there, in the thread that runs it.  The gradient
goes into its bucket; the event loop reduces a full bucket while autograd goes on.  When
autograd is done, its thread waits for the remaining buckets.

A pass that fails leaves no gradients, and the memory of the buckets is given up:
another rank may still write to it.  The ranks meet again for the next pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch._C import _will_engine_execute_node
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from asyncrpc.core.calls.context import PassEnding, PassPart, part_of_pass_var
from asyncrpc.core.calls.futures import refuse_on_loop
from asyncrpc.core.torch_modes import plain_steps, undisturbed, with_defaults
from asyncrpc.errors import UsageError
from asyncrpc.extend import works_for
from asyncrpc.parallel.ddp.exchange import Exchange
from asyncrpc.parallel.ddp.gradients import Gradients
from asyncrpc.parallel.ddp.machine import Readiness
from asyncrpc.parallel.ddp.passes import Backward, PassConfig
from asyncrpc.parallel.ddp.threads import to_its_end

_NAMED_MAX: Final = 5  # parameters that an error names
_FAILED: Final = "autograd raised an error in this backward pass"


class Reducer:
    """Runs the backward passes of one module, and reduces their gradients.

    Attributes:
        exchange: with the other ranks.
        is_syncing: whether backward passes reduce anything.
        passes: number of passes that have ended well.
        communication_s: seconds in which they had a bucket reduced.
        waited_s: seconds for which they had nothing to do but wait for that.
    """

    def __init__(self, gradients: Gradients, exchange: Exchange) -> None:
        self.exchange = exchange
        self.is_syncing = True
        self.passes = 0
        self.communication_s = 0.0
        self.waited_s = 0.0
        self._gradients = gradients
        self._loop = exchange.loop
        self._current: Backward | None = None
        self._is_entering = False
        self._watching: Any = None  # the finalizer of a pass without a gradient yet
        self._is_leaving = False  # the loop will give up the group of a failed pass
        self._abandoned: asyncio.Task[None] | None = None  # of such a pass
        self._lock = threading.Lock()  # devices have threads of their own
        self._hooks = [
            entry.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _notice(weakref.ref(self), number)
            )
            for number, entry in enumerate(gradients.learned)
        ]

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()

    def check_idle(self) -> None:
        """Refuse to go on while a pass is running."""
        if self._current is not None or self._is_entering:
            raise UsageError(
                "a backward pass of this module is running: await it first"
            )

    # --- passes that are awaited -----------------------------------------------------

    @plain_steps
    async def backward(
        self,
        roots_of: Callable[[], Sequence[torch.Tensor]],
        engine: Callable[[], None],
    ) -> None:
        """Run autograd in a thread, and reduce the gradients.

        Args:
            roots_of: returns the tensors to begin at; called first in that thread.
        """
        worker = self.exchange.group.host
        if not self.is_syncing:

            def run_alone() -> None:
                roots_of()
                engine()

            await to_its_end(worker.run_in_thread(run_alone))
            return
        self.check_idle()
        self._is_entering = True
        try:
            terms = await self._enter()
        finally:
            self._is_entering = False
        # Forward passes write to buffers that a backward pass sends, so they must have
        # ended when it begins.
        current = self._prepare(terms, is_plain=False)

        @works_for(lambda at: at["current"])
        def run() -> None:
            try:
                try:
                    roots = roots_of()
                    current.check()
                finally:
                    self.exchange.start(current)  # if only to tell the other ranks
                if self._gradients.finds_unused:
                    self._skip_unused(current, roots)
                engine()
            except BaseException as error:
                self._give_up(current, error)
                raise
            self.end(current)

        # The worker starts more threads when all wait, as these do for each other.
        ended = worker.run_in_thread(run)
        await to_its_end(ended, lambda: current.give_up(asyncio.CancelledError()))

    # --- passes that autograd begins -------------------------------------------------

    def watch(self, output: Any) -> None:
        """Let the other ranks know if autograd fails between here and a gradient.

        Args:
            output: of the module; autograd comes to its tensors before it comes to the
                parameters.
        """
        if self.is_syncing and torch.is_grad_enabled():
            reducer = weakref.ref(self)
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(_observer(reducer))

    @undisturbed
    def on_output(self) -> None:
        """Take note that autograd has come to an output of the module."""
        is_watched = self._watching is not None or self._current is not None
        if is_watched or not self.is_syncing or part_of_pass_var.get() is not None:
            return
        if _accumulates(self.exchange.parameters):
            ending = _PassEnd(self._unwatch)
            self._watching = weakref.finalize(ending, _lose, weakref.ref(self))
            Variable._execution_engine.queue_callback(ending.run)  # noqa: SLF001

    def _unwatch(self) -> None:
        if self._watching is not None:
            self._watching.detach()
            self._watching = None

    def lose(self) -> None:
        """Note that autograd has failed before the first gradient."""
        self._watching = None
        self._lose(self._tell_lost)

    def _lose(self, tell: Callable[..., None], *args: Any) -> None:
        """Drop the gradients at once: this thread may begin another pass before `tell`.

        Args:
            tell: called on the loop; ends with `_leave`.
        """
        self._gradients.drop()
        self._is_leaving = True
        # The loop may be gone, and the other ranks with it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(tell, *args)

    def _tell_lost(self) -> None:
        self.exchange.refuse("raised an error in autograd before a first gradient")
        self._leave()

    def _leave(self, _: object = None) -> None:
        self._is_leaving = False
        self.exchange.leave()

    async def _enter(self) -> PassConfig:
        """Agree on a pass, after the end of one that was abandoned."""
        if self._abandoned is not None:
            await asyncio.wait([self._abandoned])
            self._abandoned = None
        return await self.exchange.enter()

    @undisturbed
    def on_gradient(self, number: int) -> None:
        """Take a gradient; called by the thread that runs autograd."""
        if not self.is_syncing:
            self._gradients.note_use(number)
            return
        current = self._current or self._begin_plain(number)
        if current.part is None:
            current.keeps_graph = _get_current_graph_task_keep_graph()
        elif current.part is not part_of_pass_var.get():
            raise UsageError(
                "a backward pass of another context has begun to reduce the gradients "
                "of this module: await it first"
            )
        try:
            current.check()
            with self._lock:
                self._arrive(current, number)
        except BaseException as error:
            if current.is_plain:
                self._give_up(current, error)
            raise

    def _begin_plain(self, number: int) -> Backward:
        self._unwatch()  # what is refused costs this call; later errors are told
        refuse_on_loop("loss.backward()", "`await module.backward(loss)`", self._loop)
        if self.exchange.group.host.pool.is_exclusive:
            raise UsageError(
                "loss.backward() of a module on an exclusive device would keep the "
                "lock while it waits: use `await module.backward(loss)`"
            )
        part = self._part_with(number)
        if part is not None and self._gradients.leave_buckets():
            self.exchange.forget_memory()
        terms = None if self._is_leaving else self.exchange.terms
        if terms is None:
            entering = asyncio.run_coroutine_threadsafe(self._enter(), self._loop)
            terms = entering.result()
        current = self._begin(terms, is_plain=True)
        if part is not None:
            self._end_with(part, current)
            return current
        # Called by this thread when autograd has ended; torch's own DDP is called so.
        # If autograd raises, it is dropped, uncalled.
        ending = _PassEnd(functools.partial(self.end, current))
        weakref.finalize(ending, _abandon, weakref.ref(self), current)
        Variable._execution_engine.queue_callback(ending.run)  # noqa: SLF001
        return current

    def _part_with(self, number: int) -> PassPart | None:
        """Return the distributed pass that a gradient belongs to, if it does."""
        part, parameter = part_of_pass_var.get(), self.exchange.parameters[number]
        if part is None or not any(
            candidate is parameter for candidate in part.parameters
        ):
            return None  # a hook of the pass may run autograd on something else
        if part.is_over:
            raise UsageError("the distributed backward pass has been given up")
        return part

    def _end_with(self, part: PassPart, current: Backward) -> None:
        """End a pass of this module with the distributed one, after all segments."""
        current.part, current.keeps_graph = part, part.keeps_graph
        end = functools.partial(self.end, current)
        give_up = functools.partial(self.abandon, current)
        part.endings += (PassEnding(self.exchange.parameters, end, give_up),)

    def abandon_plain(self, current: Backward) -> None:
        """Give up a pass in which autograd has failed; from the thread that ran it."""
        if self._current is current:
            self._current = None
            self._lose(self._tell_abandoned, current)

    def _tell_abandoned(self, current: Backward) -> None:
        current.give_up(UsageError(_FAILED))
        self._abandoned = current.task
        if current.task is None:  # it could not even begin
            self._leave()
        else:
            current.task.add_done_callback(self._leave)

    def abandon(self, current: Backward) -> None:
        """Give up a pass, if it is still under way; called on the loop."""
        if self._current is not current:
            return
        current.give_up(UsageError(_FAILED))
        if current.task is not None:
            current.task.add_done_callback(lambda _: self._forget(current))
        elif current.is_ended:
            self._forget(current)
        else:  # it is about to begin
            self._loop.call_soon(self.abandon, current)

    def _forget(self, current: Backward) -> None:
        if self._current is current:
            self._current = None
            self._gradients.drop()
            self.exchange.leave()

    # --- one pass --------------------------------------------------------------------

    def _begin(self, terms: PassConfig, *, is_plain: bool) -> Backward:
        current = self._prepare(terms, is_plain=is_plain)
        self.exchange.start(current)
        return current

    def _prepare(self, terms: PassConfig, *, is_plain: bool) -> Backward:
        gradients = self._gradients
        buckets = gradients.cut(terms.memory)
        parts = self.exchange.group.host
        current = Backward(
            parts.loop,
            parts.pool,
            buckets,
            gradients.readiness(buckets),
            terms,
            is_plain=is_plain,
        )
        current.wants_order = not gradients.is_ordered
        if gradients.asks_who_uses:
            current.used = torch.zeros(
                len(gradients.learned), dtype=torch.int32, device="cpu"
            )
        self._current = current
        gradients.fill_unused(current)
        return current

    def _skip_unused(self, current: Backward, roots: Sequence[torch.Tensor]) -> None:
        """Mark gradients that autograd will not reach as complete."""
        reached = _reached_from(roots)
        for number, learned in enumerate(self._gradients.learned):
            if id(learned.parameter) not in reached:
                self._complete(current, number)

    def _arrive(self, current: Backward, number: int) -> None:
        readiness, gradients = current.readiness, self._gradients
        if not readiness.is_expected(number):
            name = repr(gradients.learned[number].name)
            raise UsageError(gradients.text_of_surplus(name))
        if gradients.finds_unused and gradients.learned[number].parameter.grad is None:
            current.undefined.append(number)  # autograd came here with nothing
        if readiness.arrive(number):
            if self._gradients.is_lazy(number):
                current.late.append(number)
            else:
                self._complete(current, number)

    def _complete(self, current: Backward, number: int) -> None:
        """Put a complete gradient into its bucket."""
        self._gradients.fill(current, number)
        before = current.readiness.reduced
        full = current.readiness.ready(number)
        if full > before:
            current.tell(full)

    @undisturbed
    def end(self, current: Backward) -> None:
        """Wait for the others after autograd, and take the reduced gradients."""
        try:
            with self._lock:
                self._complete_late(current)
                self._release(current)
            waited_s = current.finish()
            self._gradients.take(current)
            self._gradients.step()
            self._gradients.learn_uses(current.readiness)
            if current.order is not None:
                self._gradients.learn_order(current.order, current.terms.memory)
        except BaseException as error:
            self._give_up(current, error)
            raise
        self._current = None
        self.passes += 1
        self.waited_s += waited_s
        self.communication_s += current.communication_s

    def _complete_late(self, current: Backward) -> None:
        """Let a device compute all of its gradients at once, then take them."""
        if current.late:
            self.exchange.group.host.pool.settle()
        for number in current.late:
            self._complete(current, number)

    def _release(self, current: Backward) -> None:
        """Complete the gradients that were held back, or have not come."""
        readiness, gradients = current.readiness, self._gradients
        for number in readiness.release():
            self._complete(current, number)
        missing = readiness.missing()
        lost = [number for number in missing if not gradients.is_unused(number)]
        if lost and current.used is None:
            names = [repr(gradients.learned[number].name) for number in lost]
            text = ", ".join(names[:_NAMED_MAX])
            if len(names) > _NAMED_MAX:
                text += f" and {len(names) - _NAMED_MAX} more"
            raise UsageError(gradients.text_of_missing(text))
        for number in missing:
            self._complete(current, number)
        if current.used is not None:
            current.used[[*readiness.order, *gradients.gathered()]] = 1
            current.used[current.undefined] = 0

    def _give_up(self, current: Backward, error: BaseException) -> None:
        """End a pass that has failed, here or elsewhere; it leaves no gradient."""
        current.give_up(error)
        current.wait_ended()
        self._current = None
        self._lose(self._leave)

    # --- without data ----------------------------------------------------------------

    async def shadow(self, terms: PassConfig, *, keeps_gradients: bool) -> None:
        """Take part in a pass of other ranks, with zeros."""
        gradients = self._gradients
        buckets = gradients.cut(terms.memory)
        nothing = Readiness(buckets.numbers, [0] * len(gradients.learned))
        worker = self.exchange.group.host
        current = Backward(
            worker.loop, worker.pool, buckets, nothing, terms, is_plain=False
        )
        current.wants_order = not gradients.is_ordered
        if gradients.asks_who_uses:
            current.used = torch.zeros(
                len(gradients.learned), dtype=torch.int32, device="cpu"
            )
        gradients.fill_zeros(current)
        current.on_over()
        try:
            await self.exchange.run(current)
            current.check()
        except BaseException:
            gradients.drop()
            self.exchange.leave()
            raise
        if keeps_gradients:
            gradients.take(current)
        else:
            gradients.learn_unused(current)
            gradients.drop_views()
        if current.order is not None:
            gradients.learn_order(current.order, terms.memory)


class _PassEnd:
    """Called by autograd at the end of a pass."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def run(self) -> None:
        self._end()


def _abandon(reducer_ref: weakref.ref[Reducer], current: Backward) -> None:
    reducer = reducer_ref()
    if reducer is not None:
        reducer.abandon_plain(current)


def _observer(reducer_ref: weakref.ref[Reducer]) -> Callable[..., None]:
    """Return the function that autograd calls for an output; it holds no module."""

    def on_output(*_: Any) -> None:
        reducer = reducer_ref()
        if reducer is not None:
            reducer.on_output()

    return on_output


def _lose(reducer_ref: weakref.ref[Reducer]) -> None:
    reducer = reducer_ref()
    if reducer is not None:
        reducer.lose()


@with_defaults
def _accumulates(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether this run of autograd adds to a gradient of some parameter."""
    nodes = (
        torch.autograd.graph.get_gradient_edge(parameter).node
        for parameter in parameters
    )
    try:
        return any(map(_will_engine_execute_node, nodes))
    except RuntimeError:  # it is `torch.autograd.grad`
        return False


def _notice(
    reducer_ref: weakref.ref[Reducer], number: int
) -> Callable[[torch.Tensor], None]:
    """Return the function that autograd calls for a parameter; it holds no module."""

    def on_gradient(_: torch.Tensor) -> None:
        reducer = reducer_ref()
        if reducer is not None:
            reducer.on_gradient(number)

    return on_gradient


def _reached_from(roots: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of the parameters that autograd will reach."""
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(nodes)
    reached = {id(root) for root in roots}
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return reached
