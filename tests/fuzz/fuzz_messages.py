"""Messages: whatever a peer says that has been let in, only it has the consequences.

Bytes choose a policy, the kind of the peer, and what it does: all messages of the
table, requests, frames without a service, answers to what honest workers ask of it,
and ways to come and to go.  Each is well framed; what it says is about others, at the
edge of what may be said, or wrong in one place.  Afterwards the honest workers call
each other as before, know each other and nobody else, and keep nothing of the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgpack
import torch

from asyncrpc import AsyncRpcError, Group, Policy, RRef, Worker
from asyncrpc.autograd import backward, context
from asyncrpc.core.serde import Codec, FunctionTable, Limits, describe_exception
from asyncrpc.core.services.schema import Request
from asyncrpc.core.transport.address import Address
from asyncrpc.core.wire.frames import Flags, FrameKind, Hello
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import acting_as
from asyncrpc.tools.inspection.polling import InnerQuestions
from tests.docs.test_wire_tables import MESSAGES
from tests.fuzz.choices import Choices
from tests.fuzz.fuzz_values import EXCEPTIONS, control_of
from tests.fuzz.hostile_world import (
    AT_ONCE_S,
    LIAR,
    HostileEnd,
    Layer,
    World,
    add,
    count_to,
    double,
    fail,
    hold,
)
from tests.lies import HOSTILE, Liar

KINDS: Final = ("unjoined", "member", "guest", "observer")
STEPS_MAX: Final = 48
DIALS_MAX: Final = 8
CODEC: Final = Codec(FunctionTable(Policy.TRUSTED), None, Limits())
_HERE: Final = "tests.fuzz.hostile_world"
# What a request may name, by name.  None does harm, whatever its arguments.
FUNCTIONS: Final = (
    *(
        f"{_HERE}:{function.__name__}"
        for function in (add, count_to, double, fail, hold, Layer)
    ),
    *(f"{_HERE}:Layer.value", "builtins:len", "torch:ones_like", "torch:add"),
    *("", ":", "no:such", "no such", f"{_HERE}:", f"{_HERE}:_trace_of", "x" * 300),
    *("builtins:print.__self__", "torch.optim.sgd:SGD", "\udcff:é", "a:b:c"),
)
# Leaves of values, and names in them.
TEXTS: Final = (
    *("float32", "int64", "bool", "bfloat16", "torch.strided", "cpu", "meta", "cuda:0"),
    *("torch.sparse_coo", "<f4", "|O", "C", "zstd", "lz4", "bf16", "int8", "", "*"),
    *("builtins:list", "builtins:ValueError", "asyncrpc.errors:RemoteError"),
    *("asyncrpc.errors:WorkerLostError", f"{_HERE}:Layer", f"{_HERE}:add", "value"),
    *("type", "message", "traceback", "args", "state", "slots", "notes", "cause"),
    *("context", "suppress", "members", "worker", "pid", "fields", "params", "lr"),
    *("ps", "m", "laptop", LIAR, "=", "__class__"),
)
PICKLES: Final = (
    *(pickle.dumps(value, 5) for value in ({1: 2}, Layer, ValueError(1))),
    *(b"", b"\x80\x05.", b"\x80\x05N", b"\x80\x05cno\nsuch\n."),
)
METAS: Final = ("a", "m", "r", "l", "c", "d", "t", "n", "o", "z")
OUTCOMES: Final = (AsyncRpcError, ValueError)  # of what is asked of a liar


class Session:
    """A hostile peer, from its first connection to its last."""

    def __init__(self, world: World, choices: Choices) -> None:
        self.world = world
        self.choices = choices
        self.liar = Liar(world.facts, choices)
        self.kind = KINDS[choices.below(len(KINDS))]
        self.is_guest = self.kind == "guest"
        self.incarnation = 1 << 60 | world.number()
        self.ends: list[HostileEnd] = []
        self._links: dict[str, HostileEnd] = {}
        self._last: dict[str, Any] = {}
        self._steps: tuple[Callable[[], Any], ...] = (
            *(self._message,) * 5,
            *(self._request,) * 2,
            *(self._answer,) * 4,
            *(self._frame, self._again, self._be_asked, self._be_asked),
            *(self._wait, self._come, self._go),
        )

    async def play(self) -> None:
        """Do what was chosen."""
        if self.kind == "member":
            await self._join()
        for _ in range(STEPS_MAX):
            if not self.choices:
                return
            await self._end()
            step = self._steps[self.choices.below(len(self._steps))]
            if (waiting := step()) is not None:
                await waiting

    async def leave(self) -> None:
        """End all connections, in one of three ways."""
        how = self.choices.below(3)
        for end in self.ends:
            if how == 0:
                end.connection.close("it has lied enough")
            elif how == 1 and end.is_open:
                end.connection.send(FrameKind.GOODBYE, 0)
            if how:
                end.connection.stream.abort()
        await asyncio.sleep(AT_ONCE_S)

    # --- connections -----------------------------------------------------------------

    def _hello(self, to: str, **other: Any) -> Hello:
        fields: dict[str, Any] = {
            "name": LIAR,
            "incarnation": self.incarnation,
            "rank": -1,
            "pid": 1,
            "expects": to,
            "addresses": () if self.kind == "observer" else (f"mem://{LIAR}",),
            "observes": self.kind == "observer",
            "attempt": int(self.is_guest and to != "ps"),
        }
        return Hello(**(fields | other))

    async def _join(self) -> None:
        end = self._dial("ps", self._hello(""))
        await self._opened(end)

    def _dial(self, to: str, hello: Hello) -> HostileEnd:
        end = self.world.dial(to, hello, is_guest=self.is_guest)
        self.ends.append(end)
        return end

    async def _opened(self, end: HostileEnd) -> None:
        await asyncio.sleep(AT_ONCE_S)
        if not end.connection.opened.done():
            await asyncio.sleep(0.5)

    async def _end(self) -> HostileEnd:
        """Choose whom to speak to, and connect to it if need be."""
        self.to = ("ps", "m")[self.choices.below(2)]
        end = self._links.get(self.to)
        if (end is None or not end.is_open) and len(self.ends) < DIALS_MAX:
            end = self._links[self.to] = self._dial(self.to, self._hello(self.to))
            await self._opened(end)
        assert end is not None or len(self.ends) >= DIALS_MAX
        self.end = end or self.ends[-1]
        return self.end

    def accept(self) -> Any:
        """Make the end that an honest worker has dialed."""
        if len(self.ends) >= DIALS_MAX:
            return self.world.acceptor(self._hello("")).connection
        hello = (
            self._hello_of_choice() if self.choices.below(4) == 3 else self._hello("")
        )
        end = self.world.acceptor(hello)
        self.ends.append(end)
        return end.connection

    def _hello_of_choice(self) -> Hello:
        """Return a HELLO that is wrong in one place."""
        facts, choices = self.world.facts, self.choices
        token = self.ends[-1].connection.token if self.ends else 1
        name, values = self.liar.one_of(
            (
                ("name", ("m", "ps", "laptop", "", "x" * 300, "other")),
                ("incarnation", (*facts.numbers, 0, (1 << 64) - 1, -1)),
                ("rank", (0, 1, 2, -1, -2, (1 << 31) - 1, 1 << 40)),
                ("expects", ("", "m", "nobody", "laptop", "*", LIAR)),
                ("attempt", (0, 1, -1, 1 << 40)),
                ("addresses", ((), ("",), ("mem://m",), ("relay://m",), ("x",) * 300)),
                ("lane", (token, 0, 1, -1)),
                ("resume", (token, 0, 1, -1)),
                ("received", (0, 1, -1, 1 << 40)),
                ("sidecar", ((), ("",), ("pulse://1/2/3/4",), ("tcp://127.0.0.1:9",))),
                ("token", (token, 0, 1)),
                ("verdict", ("", "duplicate", "no")),
                ("strict", (True, False)),
                ("host_id", ("", "behind ps", "x" * 300)),
            )
        )
        return self._hello(
            self.to, **{name: values[choices.below(min(256, len(values)))]}
        )

    async def _come(self) -> None:
        """Connect once more, with something else in the HELLO."""
        if len(self.ends) < DIALS_MAX:
            end = self._dial(self.to, self._hello_of_choice())
            await self._opened(end)
            if end.is_open:
                self._links[self.to] = end

    def _go(self) -> None:
        """End this connection, or break its transport."""
        if self.choices.below(2):
            self.end.connection.close("")
        else:
            self.end.connection.stream.abort()

    async def _wait(self) -> None:
        await asyncio.sleep((AT_ONCE_S, AT_ONCE_S, 0.1, 3.0)[self.choices.below(4)])

    # --- what it says ----------------------------------------------------------------

    def _send(self, kind: int, call_id: int, **parts: Any) -> None:
        self._last = {"kind": kind, "call_id": call_id, **parts}
        if self.end.is_open:
            self.end.connection.send(**self._last)

    def _again(self) -> None:
        if self._last and self.end.is_open:
            self.end.connection.send(**self._last)

    def _call_id(self) -> int:
        """Return the number of a new call, as a rule."""
        if self.choices.below(16) == 15:
            return self.liar.one_of((1, 0, 2, self.end.next_id - 1, (1 << 64) - 1))
        self.end.next_id += 1
        return self.end.next_id - 1

    def _message(self) -> None:
        kind = self.liar.kind(MESSAGES)
        content = self.liar.content(kind)
        if self.kind == "observer":
            encoded: tuple[bytes, list[memoryview]] = _packed(content), []
        else:
            encoded = _encoded(content)
        control, buffers = encoded
        if not issubclass(kind, Request):
            parts = {"head": kind.head, "control": control, "buffers": buffers}
            self._send(FrameKind.NOTICE, 0, **parts)
            return
        call_id = self._call_id()
        self.end.services[call_id] = kind.name
        budget = self.liar.one_of((-1, 10**9, 0, 1, -(1 << 63)))
        self._send(
            FrameKind.SERVICE,
            call_id,
            aux=budget,
            head=kind.head,
            control=control,
            buffers=buffers,
        )

    def _request(self) -> None:
        choices, liar = self.choices, self.liar
        target: Any = [liar.one_of((0, 1, 2, 65537, -1)), liar.one_of(FUNCTIONS)]
        how = choices.below(8)
        if how == 1:
            target = liar.one_of((1, 2, 0, -1, 1 << 40, None, True, "add", [], [1]))
        elif how >= 5:
            life, number = liar.one_of(self.world.facts.ids)
            methods = ("value", "", "forward", "__init__", "parameter", "no such")
            target = ["=", life, number, liar.one_of(methods)]
        head = _head([target, self._meta()])
        control, buffers = self._value(is_request=True)
        call_id = self._call_id()
        self.end.services.pop(call_id, None)
        self._send(
            FrameKind.REQUEST,
            call_id,
            flags=Flags.STREAM if choices.below(4) == 3 else 0,
            aux=liar.one_of((-1, 10**9, 0, 1, -(1 << 63))),
            head=head,
            control=control,
            buffers=buffers,
        )

    def _meta(self) -> Any:
        """Return what goes beside the arguments."""
        how = self.choices.below(4)
        if how < 2:
            return None
        if how == 2:
            return {self.liar.one_of(METAS): self.choices.tree(TEXTS)}
        life, number = self.liar.one_of(self.world.facts.ids)
        loans = self.liar.value(_LOANS)
        return self.liar.one_of(
            (
                {"a": [life, number, self.choices.below(8)]},
                {"a": [life, number, self.choices.below(8), "m"]},
                {"r": [life, number]},
                {"r": [self.incarnation, self.choices.below(8)]},
                {"l": loans},
                {"c": "zstd"},
                {"d": {"*": "meta"}},
                {"m": [self.choices.below(8), {"cpu": "bfloat16"}]},
                {"n": [0.5, True, None]},
                {"o": "NOT_EXECUTED"},
            )
        )

    def _value(self, *, is_request: bool = False) -> tuple[bytes, list[memoryview]]:
        """Return a control part and buffers."""
        choices = self.choices
        how = choices.below(4)
        if how == 0:
            value = self.liar.one_of(VALUES)
        elif how == 1:
            value = self.liar.one_of(HOSTILE)
        else:
            lengths = [choices.below(256) for _ in range(choices.below(4))]
            control = control_of(choices, TEXTS, PICKLES)
            return control, [memoryview(bytearray(length)) for length in lengths]
        return _encoded([[value, 2], {}] if is_request else value)

    def _frame(self) -> None:
        kind, call_id, number = self.liar.frame()
        self._send(kind, call_id, aux=number, flags=self.liar.one_of((0, 0, 0, 16, 1)))

    # --- what it answers -------------------------------------------------------------

    def _be_asked(self) -> None:
        """Let an honest worker ask something of the liar."""
        worker = self.world.ps if self.to == "ps" else self.world.m
        ask = ASKING[self.choices.below(len(ASKING))]
        self.world.begin(ask(worker, self.world), OUTCOMES)

    async def _answer(self) -> None:
        """Answer what was asked, or what was not."""
        await asyncio.sleep(AT_ONCE_S)
        kind, call_id, head = 0, self.choices.below(4), b""
        ends = [end for end in self.ends if end.is_open and end.asked]
        if ends and self.choices.below(16) != 15:
            self.end = self.liar.one_of(ends)
            kind, call_id, head = self.end.asked[-1]
            if self.choices.below(4) != 3:
                self.end.asked.pop()
        self._reply(kind, call_id, head)

    def _reply(self, kind: int, call_id: int, head: bytes) -> None:
        how = self.choices.below(8)
        meta = [] if self.choices.below(2) else [self._meta()]
        packed = _head(meta) if meta else b""
        if how < 4:
            control, buffers = self._value_for(kind, head)
            parts = {"head": packed, "control": control, "buffers": buffers}
            self._send(FrameKind.RESPONSE, call_id, **parts)
        elif how == 4:
            self._send(
                FrameKind.ERROR,
                call_id,
                aux=self.liar.one_of((0, 1, -1, 1 << 62)),
                head=packed,
                control=self._error(),
            )
        elif how < 7:
            serial = self.liar.one_of((0, 1, 2, 3, -1, 1 << 40, "0", None))
            control, buffers = self._value()
            head = _head([serial, *meta])
            parts = {"head": head, "control": control, "buffers": buffers}
            self._send(FrameKind.STREAM_ITEM, call_id, **parts)
        else:
            count = self.liar.one_of((0, 1, 2, -1, 1 << 62))
            self._send(FrameKind.STREAM_END, call_id, aux=count, head=packed)

    def _value_for(self, kind: int, head: bytes) -> tuple[bytes, list[memoryview]]:
        """Return the answer to a message, right or nearly so; else any value."""
        if kind == FrameKind.SERVICE and self.choices.below(8) != 7:
            service, method, *_ = msgpack.unpackb(head)
            asked = MESSAGES.get((service, "SERVICE", method))
            if asked is not None and issubclass(asked, Request):
                answer = self.liar.value(asked.answer)
                return _encoded(self.liar.spoiled(answer))
        return self._value()

    def _error(self) -> bytes:
        how = self.choices.below(3)
        if how == 0:
            return ERRORS[self.choices.below(len(ERRORS))]
        if how == 1:
            return control_of(self.choices, TEXTS, PICKLES)
        tree = {name: self.choices.tree(TEXTS) for name in sorted(EXCEPTIONS)}
        return _encoded({**tree, "type": self.liar.one_of(TEXTS)})[0]

    # --- what is wrong ---------------------------------------------------------------

    def problems(self) -> Iterator[str]:
        """Give what the honest ends should not have answered."""
        for end in self.ends:
            for kind, call_id, control in end.answers:
                name = end.services.get(call_id, "optim.")
                if kind != FrameKind.ERROR or name.startswith(USERS_CODE):
                    continue
                if self.kind == "observer":
                    continue  # a text, and the log has what is unexpected
                tree = CODEC.decode(control, [])
                if not str(tree["type"]).startswith("asyncrpc."):
                    yield f"{name} was answered by {tree['type']}: {tree['traceback']}"


def _encoded(value: Any) -> tuple[bytes, list[memoryview]]:
    encoded = CODEC.encode(value)
    return encoded.control, encoded.buffers


def _head(record: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(record, unicode_errors="surrogatepass")
    return packed


def _packed(content: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(content)
    except (TypeError, ValueError, OverflowError):
        packed = b"\xc1"
    return packed


# --- what honest workers ask of a liar -----------------------------------------------


async def _call(worker: Worker, _: World) -> None:
    await worker.peer(LIAR).call(add, 1, 2)


async def _consume(worker: Worker, _: World) -> int:
    async with contextlib.aclosing(worker.peer(LIAR).stream(count_to, 5)) as items:
        return len([item async for item in items])


async def _refer(worker: Worker, _: World) -> None:
    with acting_as(worker):
        layer: Any = worker.peer(LIAR).remote(Layer)
        await layer.rpc_async().value()


async def _lend(worker: Worker, world: World) -> None:
    with acting_as(worker):
        held = world.layer if worker is world.ps else RRef(torch.ones(2))
        await worker.peer(LIAR).call(double, held)


async def _differentiate(worker: Worker, world: World) -> None:
    with acting_as(worker):
        async with context() as ctx:
            world.facts.ids[-1] = ctx.id
            x = torch.ones(3, requires_grad=True)
            y = await worker.peer(LIAR).call(double, x)
            if (
                isinstance(y, torch.Tensor)
                and y.requires_grad
                and y.is_floating_point()
            ):
                await backward(ctx, [y.sum()])


async def _optimize(worker: Worker, world: World) -> None:
    with acting_as(worker):
        layer: Any = worker.peer(LIAR).remote(Layer)
        optimizer = DistributedOptimizer(torch.optim.SGD, [layer], lr=0.5)
        async with context() as ctx:
            y = await layer.rpc_async().forward(torch.ones(3))
            if (
                isinstance(y, torch.Tensor)
                and y.requires_grad
                and y.is_floating_point()
            ):
                await backward(ctx, [y.sum()])
            await optimizer.step(ctx)


async def _reduce(worker: Worker, _: World) -> None:
    group = Group(worker, members=[worker.name, LIAR], timeout_s=5.0)
    try:
        await group.all_reduce(torch.ones(4))
        await group.broadcast(torch.ones(2), root=1)
    finally:
        group.close()


async def _find(worker: Worker, _: World) -> None:
    await worker.find("somebody", timeout_s=1.0)


async def _hold(worker: Worker, _: World) -> None:
    await worker.peer(LIAR).using(timeout_s=2.0).call(hold)


async def _look(worker: Worker, _: World) -> None:
    questions: Any = InnerQuestions(worker)
    for member in await questions.members():
        if member.name == LIAR:
            for name, fields in LOOKS.items():
                request = MESSAGES["inspection", "SERVICE", name](*fields)
                with contextlib.suppress(TimeoutError):
                    await questions.ask(member, request, timeout_s=2.0)


LOOKS: Final[dict[str, Any]] = {"snapshot": (True,), "summary": (), "calls": (9,)}
ASKING: Final = (
    *(_call, _consume, _refer, _lend, _differentiate, _optimize, _reduce, _find, _hold),
    _look,
)
USERS_CODE: Final = ("optim.",)  # runs optimizers of the peer's choice
VALUES: Final[tuple[Any, ...]] = (
    *(3, None, torch.ones(3), "a", [1, 2], {"a": torch.ones(2)}, add, Layer, (1, 2)),
    *(torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3))),
    *(ValueError("a value"), torch.float32, 1 << 70, b"x" * 20_000, torch.zeros(0)),
    *(torch.eye(2).to_sparse(), torch.ones(3, device="meta"), torch.arange(3)),
)
ERRORS: Final = tuple(
    CODEC.encode(describe_exception(error, CODEC, worker="w", pid=1)).control
    for error in (
        ValueError("it says so"),
        AsyncRpcError("it says so"),
        ExceptionGroup("many", [ValueError(1), TypeError(2)]),
    )
)
_LOANS: Any = MESSAGES["rref", "NOTICE", "returned"].record.places[0][1]

# --- the target ----------------------------------------------------------------------

_worlds: dict[Policy, World] = {}


def world_of(policy: Policy) -> World:
    if policy not in _worlds:
        _worlds[policy] = World(policy)
    return _worlds[policy]


def check(data: bytes) -> None:
    """Let a hostile peer do what was chosen, among honest workers."""
    choices = Choices(data)
    policy = (Policy.STRICT, Policy.TRUSTED)[choices.below(2)]
    world = world_of(policy)
    world.complaints.take()
    try:
        problems = world.run(_session(world, choices))
    except BaseException:
        del _worlds[policy]
        raise
    if problems:
        del _worlds[policy]
        raise AssertionError("\n".join(problems))


async def _session(world: World, choices: Choices) -> list[str]:
    is_whole = choices.below(4) == 3
    wrong = await _lied(world, choices, is_whole=is_whole)
    # By now nothing refers to the hostile ends: over memory the two know each other.
    wrong += await world.recovered()
    await world.work(is_whole=is_whole)
    if is_whole:
        await world.serve()
    return wrong


async def _lied(world: World, choices: Choices, *, is_whole: bool) -> list[str]:
    """Let a hostile peer come and go; return what was answered wrongly."""
    session = Session(world, choices)
    listener = world.hub.listen(Address("mem", LIAR), session.accept)
    try:
        if is_whole:
            await world.train(session.play)
        else:
            await session.play()
        await world.work(is_whole=is_whole)
        await session.leave()
    finally:
        await listener.close()
    return list(session.problems())


@contextlib.contextmanager
def setting() -> Iterator[None]:
    """End the worlds that were made."""
    try:
        yield
    finally:
        for world in _worlds.values():
            world.close()
        _worlds.clear()


def seeds() -> Iterator[bytes]:
    """Give each message of the table, and each way to answer what is asked."""
    for at in range(len(MESSAGES)):
        yield bytes([at & 1, 0, at % 4, at >> 1 & 1, at % 5, at, *bytes(12)])
    for at in range(3 * len(ASKING)):
        answers = [bytes([0, 7, 0, how, 0, 0, how]) for how in range(8)]
        yield bytes([at & 1, 3, at % 3, 0, 13, at // 3]) + b"".join(answers)
