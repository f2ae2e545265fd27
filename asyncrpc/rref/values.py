"""Values that are here: made by remote(), fetched, and called by their references."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from asyncrpc.errors import (
    DeadlineExceededError,
    DecodeError,
    MalformedError,
    Outcome,
    RejectedError,
    RRefDeletedError,
    UsageError,
)
from asyncrpc.ids import Incarnation, RRefId
from asyncrpc.rref import machine as m
from asyncrpc.rref.handle import RRef
from asyncrpc.rref.pins import copy_of
from asyncrpc.rref.table import RRefTable, Value
from asyncrpc.runtime.calls.futures import is_done_within, refuse_on_loop
from asyncrpc.runtime.calls.modes import MODE_ATTRIBUTE, Mode
from asyncrpc.runtime.extensions import Refused
from asyncrpc.runtime.forms import ID, TEXT, Form, array, one_of
from asyncrpc.runtime.ports import PeerLink
from asyncrpc.runtime.threads import settable

_METHOD: Final[Form] = array(
    mark=one_of({"=": ...}), creator=ID, serial=ID, method=TEXT
)


class _Returned:
    """A function that gives a value which is here."""

    __qualname__ = "to_here"  # what it is called by
    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


setattr(_Returned, MODE_ATTRIBUTE, Mode.ON_LOOP)


class OwnedValues(RRefTable):
    """The owner's side of calls on references."""

    def expect(self, link: PeerLink, rref_id: tuple[int, int]) -> None:
        """A function is about to make a value for the other end of `link`."""
        key = _id(rref_id)
        if link.peer.incarnation == self._me:
            return  # our own remote(): the entry is there
        if key.creator != link.peer.incarnation:
            raise MalformedError("a reference in the name of another worker")
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        effects = self._owner.create(key, link.peer.incarnation)
        self.value(key)
        self._carry_out(effects)

    def refusal(self) -> RejectedError | None:
        """Say why no more values can be made here; None if they can."""
        owned, owned_max = len(self._owner), self.worker.options.references_max
        if owned < owned_max:
            return None
        return RejectedError(
            f"worker {self.worker.name!r} has {owned} values that are referred to, its "
            "limit (Options.references_max); let go of references, or see in "
            "Worker.rrefs() there who holds them",
            outcome=Outcome.NOT_EXECUTED,
        )

    def fulfil(self, rref_id: tuple[int, int], value: Any) -> None:
        """The function that makes a value has returned it."""
        future = self._values.get(_id(rref_id))
        if future is not None and not future.done():
            future.set_result(value)

    def fail(self, rref_id: tuple[int, int], error: BaseException) -> None:
        """The function that makes a value has raised."""
        future = self._values.get(_id(rref_id))
        if future is not None and not future.done():
            future.set_exception(settable(error))
            future.exception()  # whoever asks is told; nobody may ever ask

    def resolve(
        self,
        link: PeerLink,
        target: list[Any],
        ready: Callable[[Callable[..., Any] | Refused], None],
    ) -> None:
        """Call `ready` with a method of a value that is here, once it is made."""
        try:
            _METHOD("what is to be called", target)
        except MalformedError as error:  # of this request, and of no other
            raise DecodeError(str(error), outcome=Outcome.NOT_EXECUTED) from error
        rref_id = _id((target[1], target[2]))
        self._carry_out(self._owner.pin(rref_id))
        if self._owner.state(rref_id) is m.EntryState.GONE:
            self._carry_out(self._owner.unpin(rref_id))
            raise RRefDeletedError("the value of this RRef has been freed")
        future = self.value(rref_id)

        def on_value(done: asyncio.Future[Any]) -> None:
            try:
                if self.is_closed:
                    return  # the end of the link tells who asks
                try:
                    found = self._method(done, target[3])
                except BaseException as error:  # noqa: BLE001  (the value's own code)
                    found = Refused(error, Outcome.EXECUTED)
                ready(found)
            finally:
                self._carry_out(self._owner.unpin(rref_id))

        if future.done():
            on_value(future)
        else:
            future.add_done_callback(on_value)

    def _method(
        self, done: asyncio.Future[Any], name: str
    ) -> Callable[..., Any] | Refused:
        """Return what to call, or why there is nothing."""
        failure = done.exception()
        if failure is not None:
            return Refused(copy_of(failure), _outcome_of(failure, name))
        value = done.result()
        if not name:
            return _Returned(value)
        # Before it is looked up: not even a property runs on the word of a peer.
        if not self.worker.functions.is_allowed_method(type(value), name):
            kind = type(value).__qualname__
            return Refused(
                RejectedError(
                    f"{kind}.{name} is not exposed here; mark {kind} with "
                    "@asyncrpc.expose, or list it in Options.allow",
                    outcome=Outcome.NOT_EXECUTED,
                )
            )
        try:
            method: Callable[..., Any] = getattr(value, name)
        except AttributeError as error:
            return Refused(error)
        return method

    def value(self, rref_id: RRefId) -> Value:
        """Return the future of a value that is here, or is to be."""
        future = self._values.get(rref_id)
        if future is None:
            future = self._values[rref_id] = Value(self.worker.loop)
        return future

    def local_value(self, handle: RRef[Any]) -> Any:
        """Return a value that is here; see `RRef.local_value`."""
        shared = handle._shared  # noqa: SLF001
        shared.check()
        if not shared.is_here:
            raise UsageError(
                f"the value of {handle!r} is on worker {shared.owner.name!r}, not on "
                f"{self.worker.name!r}; fetch a copy with `await rref.to_here()`"
            )
        future = self._values.get(handle.rref_id)
        if future is None:
            raise RRefDeletedError(f"the value of {handle!r} has been freed")
        if not future.done():
            refuse_on_loop(
                "waiting for the value in local_value()", "`await rref.to_here()`"
            )
            is_done_within(future, None)
        return result_of(future)


def result_of(done: asyncio.Future[Any]) -> Any:
    """Return a value that is here, or raise a copy of why there is none.

    Not the error that is kept: raising it would hang frames on it, and a frame may hold
    the very reference whose entry keeps the error.
    """
    error = done.exception()
    if error is not None:
        raise copy_of(error)
    return done.result()


def _outcome_of(error: BaseException, name: str) -> Outcome:
    """Return what to say of a use of a value that there is not.

    A method has not run.  Who asks for the value asks what became of its function.
    """
    kind = type(error)  # its own code may say that it is of another, or raise
    if name or issubclass(kind, RRefDeletedError):
        return Outcome.NOT_EXECUTED
    if issubclass(kind, DeadlineExceededError):
        return error.outcome  # type: ignore[attr-defined, no-any-return]
    return Outcome.EXECUTED


def _id(pair: tuple[int, int]) -> RRefId:
    return RRefId(Incarnation(pair[0]), pair[1])
