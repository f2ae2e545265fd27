"""Remote references as programs for torch know them: methods that wait block.

Source: torch.distributed.rpc.RRef, and its C++ base for the texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Final, NoReturn, TypeVar

import torch

from asyncrpc.compat.rpc import agent as agents
from asyncrpc.compat.rpc import errors
from asyncrpc.compat.rpc.constants import UNSET_RPC_TIMEOUT
from asyncrpc.compat.rpc.options import WorkerInfo
from asyncrpc.compat.rpc.rref_proxy import APIS, RRefProxy
from asyncrpc.core.calls.context import forget_deadline
from asyncrpc.core.rref.handle import RRef as Handle
from asyncrpc.core.rref.shared import Shared
from asyncrpc.errors import (
    AsyncRpcError,
    DeadlineExceededError,
    RemoteError,
    RRefDeletedError,
    UsageError,
)

T = TypeVar("T")

_ONLY_CALLS: Final = (
    "only a call can send an RRef: give it as an argument, return it, or pack it with "
    "torch.distributed.rpc.internal.serialize, and send the table too"
)


class RRef(Handle[T]):
    """A reference to a value on some worker.

    Source: torch.distributed.rpc.RRef.
    """

    __slots__ = (
        "_creation",
        "_limit_s",
        "_made_of",
        "_numbers",
        "_profiled",
        "_type",
        "_type_future",
    )

    _creation: torch.futures.Future[Any]
    _limit_s: float | None  # to make the value
    _made_of: type  # if the value is made by a class
    _numbers: tuple[tuple[int, int], int]
    _profiled: torch.futures.Future[None]  # if a profiler runs
    _type: type
    _type_future: torch.futures.Future[type]

    def __init__(self, value: T, type_hint: Any = None) -> None:
        """Refer to a value of this worker.

        Raises:
            RuntimeError: RPC has not been initialized.
        """
        _ = type_hint  # a type of TorchScript
        if not agents.is_set():
            raise RuntimeError(errors.NO_AGENT)
        agent = agents.current()
        references: Any = agent.worker.parts.references
        references.adopt(self, value)
        self._number(agent)

    # --- names -----------------------------------------------------------------------

    def _number(self, agent: agents.Agent) -> None:
        """Give a reference that was made here the numbers that torch would give it."""
        number = next(agent.reference_ids)
        fork = number if self.is_owner() else next(agent.reference_ids)
        agent.named_references[self._shared] = agent.rank, number
        self._numbers = (agent.rank, number), fork

    def _named(self) -> tuple[tuple[int, int], int]:
        """Return the numbers of the value and of this reference."""
        if not hasattr(self, "_numbers"):
            agent = agents.current()
            reference = agent.named_references.get(self._shared)
            if reference is None:
                reference = -1, self.rref_id.serial
                for name, incarnation in _incarnations(agent):
                    if incarnation == self.rref_id.creator:
                        reference = agent.rank_of(name), self.rref_id.serial - 1
            fork = reference[1] if self.is_owner() else next(agent.reference_ids)
            self._numbers = reference, fork
        return self._numbers

    def __str__(self) -> str:
        (rank, number), fork = self._named()
        value = f"GloballyUniqueId(created_on={rank}, local_id={number})"
        if self.is_owner():
            return f"OwnerRRef({value})"
        fork_id = (
            f"GloballyUniqueId(created_on={agents.current().rank}, local_id={fork})"
        )
        return f"UserRRef(RRefId = {value}, ForkId = {fork_id})"

    __repr__ = __str__

    def _user_text(self) -> str:
        (rank, number), fork = self._named()
        here = agents.current().rank if agents.is_set() else rank
        return (
            f"UserRRef(rref_id=GloballyUniqueId(created_on={rank}, local_id={number}), "
            f"fork_id=GloballyUniqueId(created_on={here}, local_id={fork}))"
        )

    def owner(self) -> WorkerInfo:  # type: ignore[override]
        """Return the worker that holds the value."""
        name = self.owner_name()
        return WorkerInfo(name, agents.current().rank_of(name))

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner will keep the value for this reference.

        It does as soon as it has the call that makes the value.  A reference that was
        passed on to this worker is kept from the start, if need be by the sender.
        """
        agent = agents.current()
        is_pending = self._service.is_pending
        return not agent.host.do_at_once(lambda: is_pending(self._shared))

    # --- the value -------------------------------------------------------------------

    def local_value(self) -> T:
        """Return the value itself, on its owner.

        Raises:
            RuntimeError: this is not the owner.
            Exception: the error of the function that makes the value.
        """
        agent = agents.current()
        if not self.is_owner():
            raise RuntimeError(
                f"For {self._user_text()}, can't call localValue() on user "
                f"{agent.get_worker_info()}. Call it on owner {self.owner()}"
            )
        return self._value(super().local_value)

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:  # type: ignore[override]
        """Return the value, or a copy of it; block until it has arrived.

        Args:
            timeout: seconds; 0: no limit; -1: the timeout of the options.

        Raises:
            RuntimeError: the timeout passed, or RPC has been shut down.
            Exception: the error of the function that makes the value.
        """
        if not agents.is_set():
            raise RuntimeError(
                f"{self._user_text()} has been deleted. Cannot call to_here() on it "
                "after deletion."
            )
        agent = agents.current()
        limit_s = agent.limit_s(timeout)

        def start() -> asyncio.Future[T]:
            forget_deadline()
            if self._shared.is_here:
                return agent.host.loop.create_task(self._service.fetch(self, limit_s))
            return self._service.start_method(self, "", (), {}, limit_s)

        def get() -> T:
            try:
                return agent.host.do(start)
            except RRefDeletedError:
                self._shared.check()  # if the owner refused to make it: the reason
                raise
            except TimeoutError as error:
                if isinstance(error, AsyncRpcError):
                    raise
                raise errors.timed_out(limit_s or 0.0) from error

        return self._value(get)

    def _value(self, get: Callable[[], T]) -> T:
        """Get the value; raise as torch does if it is not available."""
        agent = agents.current()
        try:
            return get()
        except DeadlineExceededError as error:
            own = isinstance(error, RemoteError) or self._shared.error is not None
            failed: BaseException = (
                RuntimeError(errors.NOT_MADE)
                if own
                else errors.timed_out(error.timeout_s)
            )
        except Exception as error:  # noqa: BLE001  (every one is translated)
            failed = errors.of_call(error, agent.rank_of)
        return errors.raised(failed)  # type: ignore[no-any-return]

    # --- its methods -----------------------------------------------------------------

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the owner, and block."""
        return RRefProxy(self, APIS["rpc_sync"], timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the owner, and return futures."""
        return RRefProxy(self, APIS["rpc_async"], timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the owner, and return references."""
        return RRefProxy(self, APIS["remote"], timeout)

    def _get_type(
        self,
        timeout: float = UNSET_RPC_TIMEOUT,
        blocking: bool = True,  # noqa: FBT001, FBT002  (torch's signature)
    ) -> Any:
        """Return the type of the value, or a future of the type."""
        from asyncrpc.compat.rpc import api  # noqa: PLC0415  (which needs this)

        if not blocking:
            if not hasattr(self, "_type_future"):
                self._type_future = (
                    api._rref_typeof_on_owner(self, blocking=False)  # noqa: SLF001
                    if self.is_owner()
                    else api._rref_typeof_on_user(self, timeout, blocking=False)  # noqa: SLF001
                )
            return self._type_future
        if not hasattr(self, "_type"):
            if hasattr(self, "_made_of"):
                self._await_creation(timeout)
                self._type = self._made_of
            elif self.is_owner():
                self._type = api._rref_typeof_on_owner(self)  # noqa: SLF001
            else:
                self._type = api._rref_typeof_on_user(self, timeout)  # noqa: SLF001
        return self._type

    def _await_creation(self, timeout: float) -> None:
        """Block until the owner has had the call that makes the value."""
        agent = agents.current()
        limit_s = agent.limit_s(timeout)

        async def has_ended() -> bool:
            call = self._shared.call
            if call is None:
                return True
            return bool((await asyncio.wait([call], timeout=limit_s))[0])

        if not agent.host.run(has_ended()):
            raise errors.timed_out(limit_s or 0.0)

    def _get_future(self) -> Any:
        """Return a future that completes when the owner has the value.

        It fails if that takes longer than the creation's timeout.
        """
        if not hasattr(self, "_creation"):
            agent, limit_s = agents.current(), getattr(self, "_limit_s", None)
            self._creation = agent.host.do_at_once(
                lambda: _creation_of(agent, self._shared, limit_s)
            )
        return self._creation

    def _get_profiling_future(self) -> torch.futures.Future[None]:
        """Return a future that ends when the profiler has the creation's ranges."""
        if not hasattr(self, "_profiled"):
            raise RuntimeError("Profiling future has not been set!")
        return self._profiled

    def backward(  # type: ignore[override]
        self,
        dist_autograd_ctx_id: int = -1,
        retain_graph: bool = False,  # noqa: FBT001, FBT002  (torch's signature)
    ) -> None:
        """Run a backward pass from the value, a tensor, on its owner.

        Raises:
            RuntimeError: the context does not exist, or the value is not a tensor that
                requires a gradient.
        """
        from asyncrpc.compat import autograd  # noqa: PLC0415  (which needs this)

        autograd.backward_from_reference(self, dist_autograd_ctx_id, retain_graph)

    def _set_profiling_future(self, future: torch.futures.Future[None]) -> None:
        self._profiled = future

    def _check_sendable(self) -> None:
        """Refuse a reference that no call can send."""
        if not agents.is_set():
            raise RuntimeError(
                f"{self._user_text()} has been deleted. Cannot call fork an UserRRef "
                "after deletion."
            )
        was_late = isinstance(self._shared.error, DeadlineExceededError)
        if was_late:
            raise RuntimeError(errors.NOT_MADE)

    def _serialize(self) -> NoReturn:
        self._check_sendable()
        raise RuntimeError(_ONLY_CALLS)

    @staticmethod
    def _deserialize(_fork: object) -> NoReturn:
        raise RuntimeError(_ONLY_CALLS)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when "
            "using RPC"
        )


def _incarnations(agent: agents.Agent) -> list[tuple[str, int]]:
    return [
        (member.name, member.incarnation)
        for member in agent.worker.parts.directory.members
    ]


def _creation_of(
    agent: agents.Agent, shared: Shared, limit_s: float | None
) -> torch.futures.Future[Any]:
    """Return a future that completes when a value is made, or fails at its timeout."""
    creation: torch.futures.Future[Any] = torch.futures.Future()
    call = shared.call
    if call is None:
        if shared.error is None:
            creation.set_result(None)
        else:
            creation.set_exception(errors.of_future(shared.error, agent.rank_of))
        return creation

    def late() -> None:
        call.remove_done_callback(finish)
        error = errors.timed_out(limit_s or 0.0)
        agent.in_thread(lambda: creation.set_exception(error))

    loop = agent.host.loop
    timer = None if limit_s is None else loop.call_later(limit_s, late)

    def finish(done: Any) -> None:
        if timer is not None:
            timer.cancel()
        error = errors.of_ended(done)
        if error is None:
            agent.in_thread(lambda: creation.set_result(None))
        else:
            failed = errors.of_future(error, agent.rank_of)
            agent.in_thread(lambda: creation.set_exception(failed))

    call.add_done_callback(finish)
    return creation


def start_creation(
    agent: agents.Agent,
    start: Callable[[], Handle[Any]],
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    waits: bool = True,
) -> RRef[Any]:
    """Start the creation of a value elsewhere; return the reference.

    Args:
        start: starts the call; on the loop, or in this thread if nothing waits.
    """
    try:
        handle = agent.host.do_at_once(start) if waits else copy_context().run(start)
    except (AsyncRpcError, UsageError) as error:
        failed = errors.of_call(error, agent.rank_of)
    else:
        assert isinstance(handle, RRef)
        handle._number(agent)  # noqa: SLF001
        handle._limit_s = agent.limit_s(timeout)  # noqa: SLF001
        return handle
    return errors.raised(failed)  # type: ignore[no-any-return]
