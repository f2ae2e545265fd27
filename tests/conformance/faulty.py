"""The backend FAULTY_TENSORPIPE, which loses and delays the messages that it sends.

Importing this module registers it.  It stands for torch.distributed.rpc._testing in
torch's suites of faults, and has no part in the package.

A message is identified by its content: sent again, it counts as the same message.  So a
program that repeats a lost call gets an answer in the end.

Simulated, for the types of messages that the options name:

- A lost call, or a lost creation of a value by `remote`, does not reach the callee.  It
  fails at once, as torch's does; on a network it would fail after its timeout.  A lost
  value fails like one whose creation took too long.
- A delayed message is sent later, with its arguments as they are then; its timeout
  counts from the start.  Nothing waits for it, while torch blocks the sending thread.
  If its timeout passes first, a call or a `to_here` is not sent at all; a creation is,
  as in torch: the owner makes the value, and it cannot be used.
- The same holds for messages to the worker itself; but `to_here` of its own value sends
  no message.
- In an autograd context, only calls of torch's operators whose arguments need no
  gradient: in torch all others are messages of another type, which cannot be named.
- Only the worker that made a reference knows whether a fetch is
  SCRIPT_RREF_FETCH_CALL; elsewhere all are PYTHON_RREF_FETCH_CALL.

Not simulated: RREF_FORK_REQUEST, RREF_CHILD_ACCEPT, RREF_USER_DELETE and
CLEANUP_AUTOGRAD_CONTEXT_REQ are accepted, and have no effect.  torch sends those again
until they arrive, unnoticed by the program.  asyncrpc sends its own messages for these
purposes mostly with calls and answers, and its connections number and resend them: no
single attempt could be lost.  As in torch, answers are not lost or delayed.  Nor are
the messages of a shutdown, without which torch's workers hang.

Source: torch.distributed.rpc._testing; torch's FaultyTensorPipeAgent
(torch/csrc/distributed/rpc/testing), which also counts by the bytes of a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import io
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Final
from unittest import mock

import torch
from torch.jit import _builtins
from torch.utils import _pytree

from asyncrpc.compat.rpc import backend_registry, constants, starting
from asyncrpc.compat.rpc.agent import Agent
from asyncrpc.compat.rpc.options import TensorPipeRpcBackendOptions
from asyncrpc.core.arguments import UNSET
from asyncrpc.core.autograd.contexts import current_context_var
from asyncrpc.core.calls.context import deadline_var, effective_deadline
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.links.link import Link
from asyncrpc.core.parts import Parts
from asyncrpc.core.rref.handle import RRef
from asyncrpc.core.rref.service import RRefService
from asyncrpc.core.rref.shared import Shared
from asyncrpc.errors import DeadlineExceededError, EncodeError, Outcome

# Messages whose sends are counted: more than any test sends.  The oldest is dropped.
COUNTED_MAX: Final = 1 << 16
# The facade's functions for other messages of torch, and those by which all workers
# agree to shut down.
_UNTOUCHED: Final = (
    "asyncrpc.compat.autograd:",
    "asyncrpc.compat.rpc.profiling:",
    "asyncrpc.compat.rpc.api:_gather_to_leader",
    "asyncrpc.compat.rpc.api:_broadcast_to_followers",
)
_INTENTIONAL: Final = 2  # torch's RPCErrorType
_find_builtin: Callable[[Any], str | None] = _builtins._find_builtin  # noqa: SLF001

Values = tuple[list[Any], dict[str, Any]]
OnLink = Callable[[Link], None] | None


class MessageType(enum.Enum):
    """The messages of torch that can be lost or delayed.

    SCRIPT messages run an operator of torch or a TorchScript function, PYTHON messages
    any other function.  The last four are messages of torch's own protocols.
    """

    PYTHON_CALL = enum.auto()
    SCRIPT_CALL = enum.auto()
    PYTHON_REMOTE_CALL = enum.auto()
    SCRIPT_REMOTE_CALL = enum.auto()
    PYTHON_RREF_FETCH_CALL = enum.auto()
    SCRIPT_RREF_FETCH_CALL = enum.auto()
    RREF_FORK_REQUEST = enum.auto()
    RREF_CHILD_ACCEPT = enum.auto()
    RREF_USER_DELETE = enum.auto()
    CLEANUP_AUTOGRAD_CONTEXT_REQ = enum.auto()


def message_type(name: str) -> MessageType:
    if name not in MessageType.__members__:
        known = ", ".join(MessageType.__members__)
        raise RuntimeError(
            f"No mapping to rpc::MessageType exists for {name}; there are {known}"
        )
    return MessageType[name]


class Faults:
    """Decides about each message of one worker, and counts the lost ones."""

    def __init__(
        self,
        messages_to_fail: Iterable[str],
        messages_to_delay: Mapping[str, float],
        num_fail_sends: int,
    ) -> None:
        if num_fail_sends < 0:
            raise RuntimeError("numFailSends should be non-negative")
        self._failing = frozenset(map(message_type, messages_to_fail))
        self._delays_s = {
            message_type(name): delay_s for name, delay_s in messages_to_delay.items()
        }
        for kind, delay_s in self._delays_s.items():
            if not delay_s >= 0:
                raise RuntimeError(
                    f"{kind.name} cannot be delayed by {delay_s} s: use 0 or more"
                )
        self._num_fail_sends = num_fail_sends
        self._lost: dict[tuple[MessageType, bytes], int] = {}

    def is_lost(self, kind: MessageType, outline: Callable[[], bytes]) -> bool:
        """Return whether a message sent now is lost; if so, count it."""
        if kind not in self._failing:
            return False
        message = outline()
        lost = self._lost.get((kind, message), 0)
        if lost >= self._num_fail_sends:
            return False
        self._lost[kind, message] = lost + 1
        if len(self._lost) > COUNTED_MAX:
            del self._lost[next(iter(self._lost))]
        return True

    def delay_s(self, kind: MessageType) -> float:
        """Return the delay of messages of a type, in seconds."""
        return self._delays_s.get(kind, 0.0)


# --- messages that are lost or late ---------------------------------------------------


def add_faults(parts: Parts, faults: Faults) -> None:
    """Let a worker that has references lose and delay messages."""
    calls = FaultyCalls(faults, parts)
    parts.begin = parts.calls.begin = calls.begin  # type: ignore[method-assign]


class FaultyCalls:
    """Sends calls now, later or not at all; replaces `CallStarter.begin`."""

    def __init__(self, faults: Faults, parts: Parts) -> None:
        references = parts.references
        assert isinstance(references, RRefService)
        self._faults = faults
        self._parts = parts
        self._references = references
        self._send = parts.calls.begin
        self._scripted: dict[RRefId, None] = {}  # values made by torch's operators

    def begin(
        self,
        call: CallFuture[Any],
        target: str | list[Any] | None,
        values: Values,
        *,
        timeout_s: Any = UNSET,
        meta: dict[str, Any] | None = None,
        on_link: OnLink = None,
    ) -> None:
        """Send a call now, later or not at all; see `CallStarter.begin`."""
        # A call from another thread enters here again, on the loop.
        is_here = threading.get_ident() == self._parts.tasks.thread_id
        kind = self._kind_of(target, values, meta) if is_here else None
        if kind is None:
            self._send(
                call, target, values, timeout_s=timeout_s, meta=meta, on_link=on_link
            )
            return
        _check_references(values)
        if timeout_s is UNSET:
            timeout_s = self._parts.options.rpc_timeout_s
        if self._faults.is_lost(kind, lambda: _outline(target, values, meta)):
            self._lose(call, kind, timeout_s, meta)
            return
        delay_s = self._faults.delay_s(kind)
        if not delay_s:
            self._send(
                call, target, values, timeout_s=timeout_s, meta=meta, on_link=on_link
            )
            return
        meta = self._parts.calls.meta_here() if meta is None else meta
        self._hold_back(delay_s, call, (target, values), timeout_s, meta, on_link)

    # --- types of messages -----------------------------------------------------------

    def _kind_of(
        self, target: str | list[Any] | None, values: Values, meta: Any
    ) -> MessageType | None:
        """Return the type of a message; None if the type cannot be named."""
        if isinstance(target, str) and target.startswith(_UNTOUCHED):
            return None
        is_fetch = isinstance(target, list) and not target[3]
        is_remote = bool(meta) and "r" in meta
        is_script = self._is_script(target, values)
        if is_remote and is_script:
            self._scripted[_rref_id(meta["r"])] = None
            if len(self._scripted) > COUNTED_MAX:
                del self._scripted[next(iter(self._scripted))]
        if _goes_with_gradients(values, is_script=is_script and not is_fetch):
            return None
        what = "RREF_FETCH_CALL" if is_fetch else "REMOTE_CALL" if is_remote else "CALL"
        return MessageType[f"{'SCRIPT' if is_script else 'PYTHON'}_{what}"]

    def _is_script(self, target: str | list[Any] | None, values: Values) -> bool:
        """Return whether torch would run a message without Python."""
        if isinstance(target, list):
            return not target[3] and _rref_id(target[1:3]) in self._scripted
        function = (
            values[0][0]
            if target is None
            else self._parts.targets.target(target).function
        )
        if isinstance(function, torch.jit.ScriptFunction):
            return True
        return _find_builtin(function) is not None

    # --- losing and delaying ---------------------------------------------------------

    def _lose(
        self, call: CallFuture[Any], kind: MessageType, timeout_s: Any, meta: Any
    ) -> None:
        if meta and "r" in meta:
            error: Exception = _not_made(call, timeout_s)
            self._give_up(meta, error)
        else:
            error = RuntimeError(
                f"RPCErr:{_INTENTIONAL}:Send attempt failed intentionally for "
                f"{kind.name} of {call.function!r} to {call.to!r}"
            )
        call.fail(error)

    def _give_up(self, meta: Any, error: Exception) -> None:
        """Let every use of a value fail, as if its creation had taken too long."""
        shared = self._shared_of(meta)
        if shared is not None and shared.error is None:
            shared.error = error

    def _shared_of(self, meta: Any) -> Shared | None:
        return self._references.shared.get(_rref_id(meta["r"]))

    def _hold_back(  # noqa: PLR0917
        self,
        delay_s: float,
        call: CallFuture[Any],
        message: tuple[Any, Values],
        timeout_s: float | None,
        meta: dict[str, Any],
        on_link: OnLink,
    ) -> None:
        """Send a message later; the creation of a value even if it is too late."""
        deadline = deadline_var.get()
        if timeout_s is not None:
            deadline = effective_deadline(timeout_s, self._parts.loop.time())
        limit = deadline
        if "r" in meta and deadline is not None:
            late = _not_made(call, timeout_s)
            timer = self._parts.loop.call_at(deadline.at_s, self._give_up, meta, late)
            call.add_done_callback(lambda _done: timer.cancel())
            limit = None

        def start(link: Link) -> None:
            if on_link is not None:
                with self._not_given_up(meta):
                    on_link(link)
            target, values = message
            link.start(call, target, values, deadline=limit, meta=meta)

        sending = self._parts.calls.connect_and_start(
            call, start, deadline=limit, turn=_pause(delay_s)
        )
        call.begun = self._parts.start_task(sending)

    @contextlib.contextmanager
    def _not_given_up(self, meta: Any) -> Any:
        """Return the metadata with which a value that was given up is made anyway."""
        shared = self._shared_of(meta) if "r" in meta else None
        error = None if shared is None else shared.error
        if shared is None or not isinstance(error, DeadlineExceededError):
            yield
            return
        shared.error = None
        try:
            yield
        finally:
            shared.error = error


def _not_made(call: CallFuture[Any], timeout_s: float | None) -> DeadlineExceededError:
    """Return the error of every use of a value that was not made in time."""
    return DeadlineExceededError(
        function=call.function,
        to=call.to,
        outcome=Outcome.NOT_EXECUTED,
        timeout_s=timeout_s or 0.0,
    )


@contextlib.asynccontextmanager
async def _pause(delay_s: float) -> AsyncIterator[None]:
    await asyncio.sleep(delay_s)
    yield


def _rref_id(pair: Any) -> RRefId:
    return RRefId(Incarnation(pair[0]), pair[1])


def _check_references(values: Values) -> None:
    """Refuse references of values that were given up, before a message waits."""
    for leaf in _pytree.tree_leaves(values):
        if isinstance(leaf, RRef):
            try:
                leaf._shared.check()  # noqa: SLF001
            except Exception as error:
                raise EncodeError(str(error)) from error


def _goes_with_gradients(values: Values, *, is_script: bool) -> bool:
    """Return whether torch would wrap a message in an autograd message."""
    if current_context_var.get() is None:
        return False
    if not is_script:
        return True
    leaves = _pytree.tree_leaves(values)
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


class _Outliner(pickle.Pickler):
    """Writes the parts that identify a message, without the data of tensors."""

    def persistent_id(self, value: Any) -> Any:
        """Return an id for a tensor or a reference."""
        if isinstance(value, RRef):
            return tuple(value.rref_id)
        return "tensor" if isinstance(value, torch.Tensor) else None


def _outline(target: Any, values: Values, meta: Any) -> bytes:
    """Return the identity of a message, the same if it is sent again.

    All calls of a function whose arguments cannot be pickled have the same identity.
    """
    members = list(meta["r"]) if meta and "r" in meta else None  # differs each time
    written = io.BytesIO()
    try:
        _Outliner(written).dump((target, members, values))
    except Exception:  # noqa: BLE001  (whatever the code of an argument raises)
        written = io.BytesIO(repr((target, members)).encode())
    return hashlib.blake2b(written.getvalue(), digest_size=16).digest()


# --- options and backend --------------------------------------------------------------


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options that also say which messages are lost or delayed.

    Args:
        messages_to_fail: names of types of messages; see `MessageType`.

    Raises:
        TypeError: an argument is of the wrong type.
        RuntimeError: a type of message is unknown, or a number is negative.

    Source: torch._C._distributed_rpc_testing.FaultyTensorPipeRpcBackendOptions, which
    checks the names when the agent is made.
    """

    def __init__(
        self,
        *,
        messages_to_fail: Iterable[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if isinstance(messages_to_fail, str) or not isinstance(num_fail_sends, int):
            raise TypeError(
                "messages_to_fail must be a list of names, num_fail_sends an int, not "
                f"{messages_to_fail!r} and {num_fail_sends!r}"
            )
        self._messages_to_fail = list(messages_to_fail)
        self._messages_to_delay = dict(messages_to_delay or {})
        self._num_fail_sends = num_fail_sends
        self.faults()

    @property
    def messages_to_fail(self) -> list[str]:
        return list(self._messages_to_fail)

    @property
    def messages_to_delay(self) -> dict[str, float]:
        """Seconds of delay, by the name of a type."""
        return dict(self._messages_to_delay)

    @property
    def num_fail_sends(self) -> int:
        return self._num_fail_sends

    def faults(self) -> Faults:
        """Return the faults for one worker, with nothing counted yet."""
        return Faults(
            self._messages_to_fail, self._messages_to_delay, self._num_fail_sends
        )


def _construct_options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    **options: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        **options,
    )


def _init_backend(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> Agent:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. "
            f"{rpc_backend_options}"
        )
    add_facade = starting.add_facade

    def add_all(parts: Parts) -> None:
        add_facade(parts)
        add_faults(parts, rpc_backend_options.faults())

    with mock.patch.object(starting, "add_facade", add_all):
        return starting.init_agent(store, name, rank, world_size, rpc_backend_options)


backend_registry.register_backend(
    "FAULTY_TENSORPIPE", _construct_options, _init_backend
)
