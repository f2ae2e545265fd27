"""Decides which work the loop does itself: work that is short, and torch's alone.

Handing work to a thread and learning of its end takes as long as a small backward run.
So work that has been short each time that it ran in a thread runs on the loop from then
on, until it takes long.

Work is short if it takes little processor time: on a busy machine the thread may wait
for a core, whatever the work.  Only a long wait counts, as the work itself may be
waiting.  How much is little depends on the machine: on one where the way to a thread
and back takes longer, all else takes longer, too.

Work takes the lock over `.grad` of every parameter of a worker.  Hooks run under it,
and may wait for a call whose function needs it: for a pass of another context over the
same parameters, say.  So a thread that waits for a call gives it up.  What it had in
`.grad` is taken out meanwhile, and comes back before it goes on.

The loop runs torch's own code only (`runs_torch_only`).  User code may be anywhere in a
graph or an optimizer: in hooks, Functions, subclasses of tensors, modes, kernels.  So
what is allowed is listed, by exact type and identity, and the rest goes to a thread.
Nothing is remembered, since user code may come at any time.

Python cannot see the hooks of torch's own nodes.  But torch makes a `RemovableHandle`
for each hook, whatever it is for, and counts them: while none has been made in this
process, no hook is there.  Custom functions and saved tensors can be seen.  So one hook
sends all segments to threads.  A closer look is not to be had: to register a hook with
each node, and see what else is in its list, takes 57 us for 10 nodes, where the look
takes 16 and the way to a thread 20 to 60; and it finds no hooks of tensors.

What the interpreter calls between any two lines (the garbage collector, a tracer, the
filter of warnings) is not judged here.

Source: torch/utils/hooks.py; torch/csrc/autograd/python_cpp_function.h and
python_saved_variable_hooks.h.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from asyncrpc.core.loop.clock import now_s, thread_cpu_s
from asyncrpc.core.loop.threads import ThreadPool, uncancelled
from asyncrpc.core.loop.waits import WaitDescription, WaitKind, waits
from asyncrpc.core.torch_modes import has_torchs_kernels, with_defaults

_C: Any = torch._C  # noqa: SLF001

# Within it no attribute of a tensor calls `__torch_function__`, of its class or a mode.
without_functions: Any = _C.DisableTorchFunction

# No attribute and no operation of these calls Python.
PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN_OR_NONE: Final = PLAIN | {type(None)}

# Of each of torch's own nodes: the attributes with its saved tensors.  It may have more
# nodes inside if it is a `CopySlices`.
_NODES: Final[dict[type, tuple[str, ...]]] = {
    kind: tuple(name for name in vars(kind) if name.startswith("_raw_saved_"))
    for kind in vars(_C._functions).values()  # noqa: SLF001
    if isinstance(kind, type) and kind.__name__ != "CopySlices"
}


class _HookCount:
    """The hooks of this process.

    Attributes:
        own_handles: how many asyncrpc itself has registered.
    """

    own_handles = 0


_hooks: Final = _HookCount()  # like torch's counter, of the process


def own_node(kind: type) -> None:
    """List the node of a Function of asyncrpc, which saves no tensors."""
    _NODES[kind] = ()


def note_own_handle() -> None:
    """Note that asyncrpc itself has just registered a hook."""
    _hooks.own_handles += 1


def is_plain(tensor: object) -> bool:
    """Return whether a tensor is of no subclass, whose attributes may be user code."""
    return type(tensor) in PLAIN


def are_operators_torchs() -> bool:
    """Return whether operators on plain tensors call no user code in this thread."""
    return (
        not _C._len_torch_dispatch_stack()  # noqa: SLF001
        and not _C._len_torch_function_stack()  # noqa: SLF001
        and has_torchs_kernels()
    )


def _is_engine_torchs() -> bool:
    """Return whether torch's engine itself calls no user code: hooks or a compiler."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return (
        RemovableHandle.next_id == _hooks.own_handles
        and not _C.is_anomaly_enabled()
        and (
            compiled is None
            or not (
                compiled.compiled_autograd_enabled
                or compiled.compiled_autograd_enabled_force_eager
            )
        )
    )


def runs_torch_only(
    nodes: Iterable[Any], leaves: Iterable[Any], gradients: Iterable[Any]
) -> bool:
    """Return whether the engine calls no user code in these nodes."""
    return (
        _is_engine_torchs()
        and are_operators_torchs()
        and all(map(is_plain, gradients))
        and all(
            is_plain(leaf)
            and not leaf._backward_hooks  # noqa: SLF001
            and not leaf._post_accumulate_grad_hooks  # noqa: SLF001
            for leaf in leaves
        )
        and all(map(_is_torchs, nodes))
    )


def _is_torchs(node: Any) -> bool:
    names = _NODES.get(type(node))
    if names is None:
        return False
    try:
        for name in names:
            saved = getattr(node, name)
            if saved is not None and not _is_plain_saved(saved):
                return False
    except RuntimeError:  # freed: the engine will say so
        return False
    return True


def _is_plain_saved(saved: Any) -> bool:
    if type(saved) is tuple:
        return all(map(_is_plain_saved, saved))
    return saved is None or (
        saved.unpack_hook is None and type(saved.data) in _PLAIN_OR_NONE
    )


_OWNER: Final = re.compile(r"owner=(\d+)")


class Suspendable(Protocol):
    """A change that is there only while its thread has the lock."""

    def suspend(self) -> None:
        """Take the change back for a while."""

    def resume(self) -> None:
        """Make the change again."""


class GradientLock:
    """A reentrant lock that a thread gives up while it waits for a call.

    Attributes:
        changes: what is there under the lock, in the order in which it began.
    """

    __slots__ = ("_lock", "changes")

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self.changes: list[Suspendable] = []

    @waits(lambda at: at["self"].wait_now())
    def acquire(self, blocking: bool = True) -> bool:  # noqa: FBT001, FBT002  (as RLock)
        """Wait for the lock, or do not; return whether this thread has it."""
        acquired: bool = self._lock.acquire(blocking)
        return acquired

    def release(self) -> None:
        """Let go of the lock once."""
        self._lock.release()

    @waits(lambda at: at["self"].wait_now())
    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def is_held_here(self) -> bool:
        """Return whether this thread has the lock."""
        held: bool = self._lock._is_owned()  # noqa: SLF001  (as threading.Condition does)
        return held

    @property
    def owner(self) -> int:
        """Return the ident of the thread that has the lock; 0: none has."""
        match = _OWNER.search(repr(self._lock))  # a lock tells its owner nowhere else
        return int(match[1]) if match else 0

    def wait_now(self) -> WaitDescription | None:
        """Describe the wait for the thread that has the lock, if one has."""
        if not (owner := self.owner):
            return None
        return WaitDescription(
            WaitKind.LOCK, "the lock over gradients", threads=(owner,)
        )

    def give_up(self) -> Any:
        """Take back what is there under the lock and release it, however often held."""
        changes, self.changes = self.changes, []
        for change in reversed(changes):
            change.suspend()
        return changes, self._lock._release_save()  # noqa: SLF001

    @waits(lambda at: at["self"].wait_now())
    def take_back(self, token: Any) -> None:
        """Wait for the lock again, and make the changes again."""
        changes, saved = token
        self._lock._acquire_restore(saved)  # noqa: SLF001
        for change in changes:
            change.resume()
        self.changes = changes


class GradientsSetAside:
    """Puts gradients into `.grad` for a block under the lock, and restores `.grad`.

    `contextlib.contextmanager` would take 1 us more.
    """

    __slots__ = ("_before", "_lock", "_meanwhile", "_parameters")

    def __init__(
        self,
        lock: GradientLock,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        self._lock = lock
        self._parameters = parameters
        self._meanwhile = gradients
        self._before: Sequence[torch.Tensor | None] = ()

    def __enter__(self) -> None:
        self._before = [parameter.grad for parameter in self._parameters]
        try:
            self._set_gradients(self._meanwhile)
        except BaseException:
            self._set_gradients(self._before)
            raise
        self._lock.changes.append(self)

    def __exit__(self, *_: object) -> None:
        self._lock.changes.pop()
        self._set_gradients(self._before)

    def suspend(self) -> None:
        """Restore `.grad` while this thread waits."""
        self._meanwhile = [parameter.grad for parameter in self._parameters]
        self._set_gradients(self._before)

    def resume(self) -> None:
        """Put the gradients back; others may have changed `.grad` meanwhile."""
        self._before = [parameter.grad for parameter in self._parameters]
        self._set_gradients(self._meanwhile)

    def _set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


T = TypeVar("T")

# The loop must not be held up longer than some small calls take: work that takes less
# than so many ways to a thread and back is short, within these bounds.
SHORT_S: Final = 400e-6
SHORT_MAX_S: Final = 1e-3
WAYS: Final = 5
WAYS_KEPT: Final = 15  # the last ones; their median counts
LONG: Final = 2.5  # times as long as what is short
# From begin to end.  Another process keeps a core for about 3 ms: work whose trial took
# longer may wait for an event.  On the loop, where work must not pay for a busy
# machine, only work that took much longer is taken to wait.
WAIT_S: Final = 6e-3
BLOCKED_S: Final = 50e-3
TRIALS: Final = 3  # in a thread, before the loop does the work
LATE_MAX: Final = 8  # times that the loop was held up; then there are more trials
TRIALS_MAX: Final = 1000
FORGIVEN_AFTER: Final = 100  # short runs on the loop, for each time that it was held up
KINDS_MAX: Final = 1024  # kinds of work that are remembered


# Work is worth a trial if it has at most so many tensors, each of so many elements.
SMALL: Final = 16
SMALL_NUMEL: Final = 1 << 17


class Runner:
    """Runs jobs of one worker that take a lock: on the loop, or in threads.

    Thread safety: none; all calls on the worker's loop.
    """

    def __init__(self, pool: ThreadPool, lock: GradientLock) -> None:
        self._pool = pool
        self._lock = lock
        self._policy = InlinePolicy()

    def may_run_here(self, kind: Hashable | None) -> bool:
        """Return whether `run_here` should run a job at once; it has the lock then.

        Args:
            kind: a key shared by jobs that take about as long; None: no such key.
        """
        return (
            kind is not None
            and self._policy.is_short(kind)
            and not self._pool.runs_here
            and not self._pool.is_exclusive
            and self._lock.acquire(blocking=False)
        )

    @with_defaults
    def run_here(self, kind: Hashable, job: Callable[[], T]) -> T:
        """Run a job that `may_run_here` has just allowed."""
        is_watched = self._policy.is_watched(kind)
        begun_cpu_s = thread_cpu_s() if is_watched else 0.0  # 0.5 us each
        begun_s = now_s()
        try:
            return job()
        except asyncio.CancelledError as error:  # the waiting task was not cancelled
            raise uncancelled(error) from error
        finally:
            self._lock.release()
            took_s = now_s() - begun_s
            cpu_s = thread_cpu_s() - begun_cpu_s if is_watched else None
            self._policy.note(kind, cpu_s, took_s)

    def run_in_thread(
        self, kind: Hashable | None, job: Callable[[], T]
    ) -> asyncio.Future[T]:
        """Run a job in a thread, and note how long it takes there."""
        if kind is None:
            return self._pool.run(job)
        cpu_s = took_s = 0.0

        def timed() -> T:
            nonlocal cpu_s, took_s
            begun_s, begun_cpu_s = now_s(), thread_cpu_s()
            try:
                return job()
            finally:
                cpu_s, took_s = thread_cpu_s() - begun_cpu_s, now_s() - begun_s

        def note(_: asyncio.Future[T]) -> None:
            self._policy.note(kind, cpu_s, took_s)
            self._policy.note_way(now_s() - sent_s - took_s)

        sent_s = now_s()
        work = self._pool.run(timed)
        work.add_done_callback(note)
        return work


@dataclass(slots=True)
class _Pace:
    """The record of one kind of work.

    Attributes:
        trials: short trials in a row.
        needed: trials that must be short before the loop does the work.
        late: how often the loop was held up recently.
        short: runs on the loop since then, all short.
        is_watched: whether processor time is also measured on the loop.
    """

    trials: int = 0
    needed: int = TRIALS
    late: int = 0
    short: int = 0
    is_watched: bool = False


class InlinePolicy:
    """How long each kind of work takes, as far as is known.

    Attributes:
        short_s: what takes at most so long is short; `LONG` times that is long.

    Thread safety: none; all calls on the worker's loop.
    """

    def __init__(self) -> None:
        self.short_s = SHORT_S
        self._paces: OrderedDict[Hashable, _Pace] = OrderedDict()
        self._ways_s: deque[float] = deque(maxlen=WAYS_KEPT)

    def is_short(self, kind: Hashable) -> bool:
        """Return whether work of this kind has always been short."""
        pace = self._paces.get(kind)
        return pace is not None and pace.trials >= pace.needed

    def is_watched(self, kind: Hashable) -> bool:
        """Return whether the next run on the loop must measure its processor time.

        Work that was over in less than is long cannot have taken more processor time.
        """
        pace = self._paces.get(kind)
        return pace is not None and pace.is_watched

    def note(self, kind: Hashable, cpu_s: float | None, took_s: float) -> None:
        """Record how long work of this kind took.

        Args:
            cpu_s: processor time of its thread; None for a run on the loop without a
                measurement.
        """
        pace = self._paces.get(kind)
        if pace is None:
            pace = self._paces[kind] = _Pace()
            if len(self._paces) > KINDS_MAX:
                self._paces.popitem(last=False)
        if pace.trials < pace.needed:
            is_short = (cpu_s or 0.0) <= self.short_s and took_s <= WAIT_S
            pace.trials = pace.trials + 1 if is_short else 0
            return
        long_s = LONG * self.short_s
        is_unclear = cpu_s is None and long_s < took_s <= BLOCKED_S
        pace.is_watched = is_unclear
        if is_unclear:
            return
        if took_s > BLOCKED_S or (cpu_s or 0.0) > long_s:
            pace.trials, pace.short = 0, 0
            pace.late += 1
            if pace.late >= LATE_MAX:
                pace.late, pace.needed = 0, TRIALS_MAX
        elif pace.late:
            pace.short += 1
            if pace.short >= FORGIVEN_AFTER:
                pace.late, pace.short = pace.late - 1, 0

    def note_way(self, took_s: float) -> None:
        """Record how long it took to hand work to a thread and to learn of its end."""
        self._ways_s.append(took_s)
        way_s = sorted(self._ways_s)[len(self._ways_s) // 2]
        self.short_s = min(max(SHORT_S, WAYS * way_s), SHORT_MAX_S)
