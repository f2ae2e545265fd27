"""The owner's side of calls on references: values are made, and called, here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple

from asyncrpc.core.calls.futures import is_done_within, refuse_on_loop
from asyncrpc.core.calls.modes import MODE_ATTRIBUTE, Mode
from asyncrpc.core.ids import RRefId, WorkerId
from asyncrpc.core.rref import machine as m
from asyncrpc.core.rref.handle import RRef, shared_of
from asyncrpc.core.rref.shared import copy_of
from asyncrpc.core.rref.tables import REFERENCE_BYTES, Tables
from asyncrpc.core.rref.values import Value, Values, id_of, result_of
from asyncrpc.core.serde import FunctionTable
from asyncrpc.core.services.extensions import RefusedFunction
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.services.schema import Passing, RecordSchema, Spread
from asyncrpc.errors import (
    DeadlineExceededError,
    DecodeError,
    MalformedError,
    Outcome,
    RejectedError,
    RRefDeletedError,
    UsageError,
)


class MethodTarget(NamedTuple):
    """What names a method of a value in a request.

    Attributes:
        mark: tells it from the name of a function.
        rref_id: the value.
        method: its name; empty: the value itself.
    """

    mark: Annotated[str, Passing(lambda value: value == "=", "'='")]
    rref_id: Spread[RRefId]
    method: str


_TARGET: Final = RecordSchema(MethodTarget)
_STOP: Final = 1 << 64


def _read_target(target: Any) -> tuple[RRefId, str]:
    """Return what a target names."""
    # What is right is seen here: by the schema it takes 2 us more.
    if type(target) is list and [*map(type, target)] == [str, int, int, str]:
        mark, creator, serial, method = target
        if mark == "=" and 0 <= creator < _STOP and 0 <= serial < _STOP:
            return RRefId(creator, serial), method
    try:
        _, rref_id, method = _TARGET.read_as("the target of a call", target)
    except MalformedError as error:  # of this request, and of no other
        raise DecodeError(str(error), outcome=Outcome.NOT_EXECUTED) from error
    return rref_id, method


class _LocalValue:
    """A function that returns a value of this worker."""

    __qualname__ = "to_here"  # its name in errors
    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


setattr(_LocalValue, MODE_ATTRIBUTE, Mode.ON_LOOP)


class OwnedValues:
    """Values of this worker: results of calls, and calls of their methods."""

    def __init__(
        self,
        me: WorkerId,
        tables: Tables,
        values: Values,
        functions: FunctionTable,
        *,
        values_max: int,
    ) -> None:
        self._me = me
        self._owner = tables.owner
        self._carry_out = tables.carry_out
        self._values = values
        self._functions = functions
        self._values_max = values_max

    def expect(self, link: PeerLink, rref_id: tuple[int, int]) -> None:
        """Expect a value that a function is to make for the other end of `link`."""
        key, from_ = id_of(rref_id), link.peer.incarnation
        if from_ == self._me.incarnation:
            return  # our own remote(): the entry is there
        if key.creator != from_:
            raise MalformedError("a reference names another worker as its creator")
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        link.check_room(REFERENCE_BYTES)
        effects = self._owner.create(key, from_)
        self._values.expect(key)
        self._carry_out(effects)

    def refusal(self) -> RejectedError | None:
        """Return why no more values can be made here; None if they can."""
        owned = len(self._owner)
        if owned < self._values_max:
            return None
        return RejectedError(
            f"worker {self._me.name!r} has {owned} referenced values, its limit "
            "(LimitOptions.references_max); let go of references; Worker.rrefs() "
            "there lists the holders",
            outcome=Outcome.NOT_EXECUTED,
        )

    def resolve(
        self,
        link: PeerLink,
        target: Any,
        ready: Callable[[Callable[..., Any] | RefusedFunction], None],
    ) -> RRefId | None:
        """Call `ready` with a method of a value, once the value is made."""
        _ = link  # every worker that knows a value's number may call it
        rref_id, method = _read_target(target)
        self._carry_out(self._owner.pin(rref_id))
        if self._owner.state(rref_id) is m.EntryState.GONE:
            self._carry_out(self._owner.unpin(rref_id))
            raise RRefDeletedError("the value of this RRef has been freed")
        future = self._values.expect(rref_id)

        def on_value(done: Value) -> None:
            try:
                if self._values.is_closed:
                    return  # the end of the link tells the caller
                try:
                    function = self._method(done, method)
                except BaseException as error:  # noqa: BLE001  (the value's own code)
                    function = RefusedFunction(error, Outcome.EXECUTED)
                ready(function)
            finally:
                self._carry_out(self._owner.unpin(rref_id))

        if future.done():
            on_value(future)
            return None
        future.add_done_callback(on_value)
        wanted: RRefId = rref_id
        return wanted

    def _method(self, done: Value, name: str) -> Callable[..., Any] | RefusedFunction:
        """Return what to call, or why it cannot be called."""
        failure = done.exception()
        if failure is not None:
            return RefusedFunction(copy_of(failure), _outcome_of(done, failure, name))
        value = done.result()
        if not name:
            return _LocalValue(value)
        # Before it is looked up: not even a property runs unchecked for a peer.
        try:
            self._functions.check_method(type(value), name)
            method: Callable[..., Any] = getattr(value, name)
        except (AttributeError, RejectedError) as error:
            return RefusedFunction(error)
        return method

    def local_value(self, handle: RRef[Any]) -> Any:
        """Return a value of this worker; see `RRef.local_value`."""
        shared = shared_of(handle)
        shared.check()
        if not shared.is_here:
            raise UsageError(
                f"the value of {handle!r} is on worker {shared.owner.name!r}, not on "
                f"{self._me.name!r}; fetch a copy with `await rref.to_here()`"
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


def _outcome_of(value: Value, error: BaseException, name: str) -> Outcome:
    """Return the outcome of the use of a value that was not made.

    A method has not run.  Fetching the value has the outcome of its function.
    """
    kind = type(error)  # `__class__` is the error's own code: it may lie, or raise
    if name or issubclass(kind, RRefDeletedError):
        return Outcome.NOT_EXECUTED
    if issubclass(kind, DeadlineExceededError):
        return error.outcome  # type: ignore[attr-defined, no-any-return]
    return value.outcome
