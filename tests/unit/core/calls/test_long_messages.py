"""Messages that take long are read one after the other, away from the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from asyncrpc.core.calls.long_messages import LongMessages
from asyncrpc.core.calls.machine.calls import LinkStatus
from asyncrpc.core.calls.message_codec import (
    NO_META,
    READ_HERE_BYTES_MAX,
    DecodedBuffers,
    MessageCodec,
    takes_long,
)
from asyncrpc.core.calls.ports import CallConnection, CallHost
from asyncrpc.core.loop.threads import Done, Job
from asyncrpc.core.serde import Codec, FunctionTable, Policy, kinds
from asyncrpc.errors import AsyncRpcError, DecodeError, MalformedError, RejectedError
from tests.unit.core.calls.fakes import Turns


class Connection:
    """A connection that waits, or ends."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.errors: list[AsyncRpcError] = []

    def fail(self, error: AsyncRpcError) -> None:
        self.errors.append(error)


class Host:
    """Threads whose jobs run when the test says so; with no pool, none."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Job, Done]] = []
        self.is_closed = False

    @property
    def host_pool(self) -> Host:
        return self

    def submit(self, job: Job, done: Done) -> None:
        if self.is_closed:
            raise RejectedError("the worker is closing")
        self.jobs.append((job, done))

    def run(self) -> None:
        """Run the next job, and tell its outcome."""
        job, done = self.jobs.pop(0)
        try:
            result = job()
        except Exception as error:  # noqa: BLE001  (as a pool does)
            done(None, error)
        else:
            done(result, None)


class Messages:
    """A codec whose values are their control parts; `@` begins references."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], object]] = []
        self.lifts: list[int] = []
        self.returned: list[Any] = []

    def call_soon(self, callback: Callable[[], object]) -> None:
        self.soon.append(callback)

    def may_refer(self, control: bytes) -> bool:
        return control[:1] == b"@"

    def references_in(self, control: bytes) -> list[int]:
        return list(range(int(control[1:])))

    def lift(self, trees: Sequence[Any], lifted: list[Any]) -> list[Any]:
        self.lifts.append(len(trees))
        lifted.extend(trees)
        return list(trees)

    def join(self, meta: Any) -> None:
        if "broken" in meta:
            raise MalformedError("the meta of a request is wrong")

    def joined(self, on_gradient: None) -> None:
        pass

    def read_apart(
        self, control: bytes, buffers: Any, _: None, lifted: Any, loans: Any
    ) -> DecodedBuffers:
        if control == b"no value":
            return DecodedBuffers(buffers, loans=loans, error=DecodeError("no value"))
        return DecodedBuffers(buffers, control, loans=loans, values=len(lifted))

    def give_back(self, _: bytes, decoded: DecodedBuffers) -> None:
        self.returned.append(decoded.take_loans())


class Setting:
    """The long messages of a link, and what they act on."""

    def __init__(self) -> None:
        self.host, self.messages = Host(), Messages()
        self.connection, self.status = Connection(), LinkStatus()
        self.long = LongMessages(
            cast("CallHost", self.host),
            messages=cast("MessageCodec", self.messages),
            connection=cast("CallConnection", self.connection),
            status=self.status,
        )
        self.delivered: list[tuple[Any, BaseException | None]] = []

    def deliver(self, _: bytes, decoded: list[memoryview]) -> None:
        assert isinstance(decoded, DecodedBuffers)
        self.delivered.append((decoded.value, decoded.error))

    def take(self, control: bytes, meta: Any = NO_META, **more: Any) -> None:
        self.long.take(meta, control, [], more.pop("deliver", self.deliver), **more)


def test_messages_are_read_one_at_a_time_in_order() -> None:
    setting = Setting()
    for name in (b"first", b"second", b"third"):
        setting.take(name)
    for count in (1, 2, 3):
        assert len(setting.host.jobs) == 1
        assert setting.connection.turns.holds == 1
        setting.host.run()
        assert len(setting.delivered) == count
    assert [value for value, _ in setting.delivered] == [b"first", b"second", b"third"]
    assert not setting.connection.turns.holds


def test_references_are_taken_in_turns_of_the_loop() -> None:
    setting = Setting()
    setting.take(b"@1000")
    setting.host.run()
    while setting.messages.soon:
        setting.messages.soon.pop(0)()
    assert sum(setting.messages.lifts) == 1000
    assert max(setting.messages.lifts) <= 128
    setting.host.run()
    assert setting.delivered == [(b"@1000", None)]


def test_unwanted_message_returns_its_references() -> None:
    setting = Setting()
    setting.take(b"@3", deliver=None)
    setting.host.run()
    while setting.messages.soon:
        setting.messages.soon.pop(0)()
    assert setting.messages.returned == [[0, 1, 2]]
    assert not setting.host.jobs
    assert not setting.connection.turns.holds


@pytest.mark.parametrize("meta", [NO_META, {"broken": 1}])
def test_unreadable_message_affects_no_other(meta: Any) -> None:
    setting = Setting()
    setting.take(b"no value", meta)
    setting.take(b"value")
    while setting.host.jobs:
        setting.host.run()
    (_, error), (value, _) = setting.delivered
    assert isinstance(error, MalformedError if meta else DecodeError)
    assert value == b"value"
    assert not setting.connection.errors


def test_worker_without_threads_reads_on_its_loop() -> None:
    setting = Setting()
    setting.host.is_closed = True
    setting.take(b"value")
    assert setting.delivered == [(b"value", None)]
    assert not setting.connection.turns.holds


def test_failing_job_ends_its_message_alone() -> None:
    setting = Setting()
    setting.take(b"@no number")
    setting.take(b"value")
    while setting.host.jobs:
        setting.host.run()
    assert isinstance(setting.delivered[0][1], ValueError)
    assert setting.delivered[1] == (b"value", None)


def test_lost_link_delivers_nothing_more() -> None:
    setting = Setting()
    setting.take(b"first")
    setting.take(b"second")
    setting.status.on_lost("gone")
    while setting.host.jobs:
        setting.host.run()
    assert not setting.delivered


def test_message_that_breaks_the_protocol_ends_the_connection() -> None:
    setting = Setting()

    def refuse(*_: Any) -> None:
        raise MalformedError("call 7 was made twice")

    setting.take(b"first", deliver=refuse)
    setting.take(b"second")
    setting.host.run()
    assert [str(error) for error in setting.connection.errors] == [
        "call 7 was made twice"
    ]
    assert not setting.host.jobs


# --- which messages take long --------------------------------------------------------


def control_of(value: Any) -> bytes:
    control: bytes = Codec(FunctionTable(Policy.STRICT)).encode(value).control
    return control


SHORT = {
    "a text": "n" * (READ_HERE_BYTES_MAX - 100),
    "numbers": [n / 7 for n in range(6000)],
    "some lists": [[n] for n in range(4000)],
    "some sets": [{n} for n in range(900)],
}
LONG = {
    "a longer text": "n" * (READ_HERE_BYTES_MAX + 100),
    "lists": [[] for _ in range(READ_HERE_BYTES_MAX - 100)],
    "maps": [{} for _ in range(READ_HERE_BYTES_MAX // 2)],
    "tuples": [(n,) for n in range(5000)],
    "a set of tuples": {(n, n) for n in range(5000)},
}


@pytest.mark.parametrize("name", SHORT)
def test_short_messages_are_read_on_the_loop(name: str) -> None:
    assert not takes_long(control_of(SHORT[name]), [])


@pytest.mark.parametrize("name", LONG)
def test_long_messages_are_read_in_threads(name: str) -> None:
    assert takes_long(control_of(LONG[name]), [])


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_copied_bytes_count_as_long(kind: type) -> None:
    encoded = Codec(FunctionTable(Policy.STRICT)).encode([kind(2 << 20)])
    assert takes_long(encoded.control, encoded.buffers)
    buffers = [memoryview(bytearray(buffer)) for buffer in encoded.buffers]
    (value,) = Codec(FunctionTable(Policy.STRICT)).decode(encoded.control, buffers)
    assert value == kind(2 << 20)
    assert type(value) is kind


def test_tensors_do_not_count_as_long() -> None:
    import torch  # noqa: PLC0415

    encoded = Codec(FunctionTable(Policy.STRICT)).encode([torch.zeros(1 << 20)])
    assert not takes_long(encoded.control, encoded.buffers)
    assert encoded.control[: kinds.LENGTH_BYTES] != bytes(kinds.LENGTH_BYTES)
