"""Honest workers in one process and no time at all, and the end of a hostile peer.

Two members and a guest of the first run on virtual time, over memory.  They hold
references to each other's values, train, reduce, and know each other; `World.problems`
says what of it is no longer so.  A `HostileEnd` is a connection that has come through
the handshake, over which anything may be sent, and which keeps what is asked over it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar

import torch

import asyncrpc
from asyncrpc import (
    Group,
    JoinRendezvous,
    LimitOptions,
    LivenessOptions,
    LocalRendezvous,
    NetworkOptions,
    Options,
    Policy,
    RRef,
    Worker,
)
from asyncrpc.autograd import backward, context
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.tokens import Token
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.memory import MemoryHub
from asyncrpc.core.wire.frames import FrameKind, Hello
from asyncrpc.core.wire.handshake import NONCE_BYTES, Handshake, Role
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.serving import Publisher, Replica, Replicas, ServedModel
from asyncrpc.testing import acting_as
from asyncrpc.testing.cluster import take_choices_from
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.inner_state import optimizers_here, turns_of
from tests.lies import Facts

T = TypeVar("T")

SECRET: Final = "a secret of the honest ones"
LIAR: Final = "liar"
ALLOWED: Final = ("torch.optim.sgd:SGD", "torch.nn.parameter:*")
OPTIONS: Final = Options(
    secret=SECRET,
    drain_timeout_s=1.0,
    rpc_timeout_s=30.0,
    allow=ALLOWED,
    network=NetworkOptions(connect_timeout_s=1.0),
    liveness=LivenessOptions(heartbeat_s=2.0, lost_after_s=4.0),
    limits=LimitOptions(  # low, so that they are within reach
        shared_memory_bytes=0,
        receive_pool_bytes=0,
        inbound_calls_max=64,
        references_max=32,
        stream_items_max=4,
        inbound_bytes_max=1 << 20,
        outbound_bytes_max=1 << 20,
        message=MessageLimits(
            control_bytes_max=1 << 17,
            payload_bytes_max=1 << 20,
            buffers_max=64,
            transfers_max=8,
        ),
    ),
)
AT_ONCE_S: Final = 1e-6  # on virtual time: until nothing is left to be done
RECOVERY_S: Final = 60.0  # after which nothing of a liar may be left
STEP_S: Final = 2.0
FOREVER_S: Final = 1e9


@asyncrpc.expose
async def add(first: int, other: int) -> int:
    return first + other


@asyncrpc.expose
async def count_to(number: int) -> AsyncIterator[int]:
    for item in range(number):
        yield item


@asyncrpc.expose
async def hold() -> None:
    await asyncio.Event().wait()


@asyncrpc.expose
def double(x: Any) -> Any:
    return x * 2


@asyncrpc.expose
def fail() -> None:
    raise ValueError("as asked")


@asyncrpc.expose
class Layer:
    """One parameter."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def parameter(self) -> RRef[torch.nn.Parameter]:
        return RRef(self.weight)

    def value(self) -> torch.Tensor:
        return self.weight.detach().clone()


class Complaints(logging.Handler):
    """What the loop and the log say that should never be said."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []  # of it

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.texts.append(f"log: {self.format(record)}")

    def on_loop(self, _loop: object, context: dict[str, Any]) -> None:
        self.texts.append(f"loop: {context.get('message')}: {context!r:.500}")
        if error := context.get("exception"):
            self.texts[-1] += _trace_of(error)

    def take(self) -> list[str]:
        taken, self.texts = self.texts, []
        return taken


def _trace_of(error: BaseException) -> str:
    import traceback  # noqa: PLC0415

    return "".join(traceback.format_exception(error))


class HostileEnd:
    """The hostile end of a connection; what it sends has the form of frames."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, handshake: Handshake, hello: Hello
    ) -> None:
        # Kind, number and head of what the honest end asks.
        self.asked: list[tuple[int, int, bytes]] = []
        # Kind, number and control part of what it answers.
        self.answers: list[tuple[int, int, bytes]] = []
        # Numbers of the requests to services that were sent.
        self.services: dict[int, str] = {}
        self.next_id = 1
        self._hello = hello
        self._is_acceptor = handshake.role is Role.ACCEPTOR

        def introduce(connection: Connection) -> None:
            if not self._is_acceptor:
                connection.hello(hello)

        # To an honest worker.
        self.connection = Connection(
            handshake,
            loop=loop,
            limits=MessageLimits(),
            introduce=introduce,
            on_hello=self._on_hello,
        )
        self.connection.opened.add_done_callback(_look_at)
        self.connection.ended.add_done_callback(_look_at)

    def _on_hello(self, connection: Connection, _: Hello) -> None:
        if self._is_acceptor:
            connection.hello(self._hello)
        connection.open_to(self)

    @property
    def is_open(self) -> bool:
        return self.connection.opened.done() and not self.connection.ended.done()

    def on_message(
        self,
        kind: int,
        _flags: int,
        call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        _buffers: list[memoryview],
    ) -> None:
        if kind in (FrameKind.REQUEST, FrameKind.SERVICE):
            self.asked.append((kind, call_id, head))
        elif kind in (FrameKind.RESPONSE, FrameKind.ERROR):
            self.answers.append((kind, call_id, bytes(control)))
        elif kind == FrameKind.PING:  # else it is suspected, and its end waited for
            self.connection.send(FrameKind.PONG, call_id)

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """Do nothing."""


async def _do_nothing() -> None:
    """Do nothing."""


def _look_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


class World:
    """The honest workers.

    Attributes:
        facts: what is true of them.
        all: `ps` and `m`, members, and `laptop`, a guest of `ps`.
        token: of the liar, if it is a guest.
    """

    def __init__(self, policy: Policy) -> None:
        self.loop = SimLoop()
        self.loop.limit_s = math.inf
        self.complaints = Complaints()
        self.loop.set_exception_handler(self.complaints.on_loop)
        self._dice = Network(0, self.loop)
        self.hub = MemoryHub()
        self._policy = policy
        self._steps = self._liars = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        logger = logging.getLogger("asyncrpc")
        logger.addHandler(self.complaints)
        logger.propagate = False
        self.run(self._begin())
        self._before = self._tables()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        """End the workers."""
        logger = logging.getLogger("asyncrpc")
        logger.removeHandler(self.complaints)
        logger.propagate = True
        self.run(self._end())
        self.loop.close()

    async def _end(self) -> None:
        for group in self._groups:
            group.close()
        await self._router.__aexit__(None, None, None)
        await self._replica.__aexit__(None, None, None)
        for worker in self.all[::-1]:
            await worker.shutdown(drain_timeout_s=0.0)

    def number(self) -> int:
        """Return a number that no liar has had."""
        self._liars += 1
        return self._liars

    # --- the beginning ---------------------------------------------------------------

    async def _begin(self) -> None:
        meeting = LocalRendezvous(2)
        ps, m = (
            self._worker(name, rank=at, rendezvous=meeting)
            for at, name in enumerate(("ps", "m"))
        )
        async with asyncio.TaskGroup() as starting:
            starting.create_task(ps.__aenter__())
            starting.create_task(m.__aenter__())
        tokens = [
            ps.tokens.issue(valid_s=FOREVER_S, name=name) for name in ("laptop", LIAR)
        ]
        self.token = Token.parse(tokens[1])
        laptop = self._worker(
            "laptop", rendezvous=JoinRendezvous(["mem://ps"]), token=tokens[0]
        )
        await laptop.__aenter__()
        await m.find("laptop", timeout_s=30.0)
        self.all = self.ps, self.m, self.laptop = ps, m, laptop
        with acting_as(ps):
            self.layer: Any = ps.peer("m").remote(Layer)
            self.parameter = await self.layer.rpc_async().parameter()
            self._optimizer = DistributedOptimizer(
                torch.optim.SGD, [self.parameter], lr=0.5
            )
        names = [worker.name for worker in self.all]
        # `ps` serves a model to routers and publishers; `m` is one of each.
        self._served = ServedModel(torch.nn.Linear(2, 1))
        self._replica = Replica(ps, model=self._served)
        await self._replica.__aenter__()
        self._router = await Replicas(m, "ps").__aenter__()
        self._publisher = Publisher(m, "ps")
        self._groups = [
            Group(worker, members=names, timeout_s=30.0) for worker in self.all
        ]
        self.facts = Facts(self.all)
        self.facts.numbers += [group._matching.id for group in self._groups[:1]]  # noqa: SLF001
        self.facts.texts.append(LIAR)
        self.facts.ids += [self.layer.rref_id, self.parameter.rref_id, (0, 0)]
        await self.work(is_whole=True)
        await self.train(_do_nothing)
        await asyncio.sleep(RECOVERY_S)

    def _worker(self, name: str, *, token: str = "", **keywords: Any) -> Worker:
        options = Options(
            **{
                field: getattr(OPTIONS, field)
                for field in OPTIONS.__dataclass_fields__
                if field not in ("policy", "token", "secret")
            },
            policy=self._policy,
            token=token or None,
            secret=None if token else SECRET,
        )
        worker = Worker(name, network=self.hub.connector(), options=options, **keywords)
        take_choices_from(self._dice, worker.parts)
        return worker

    # --- what the honest ones do -----------------------------------------------------

    async def work(self, *, is_whole: bool) -> None:
        """Call each other; also train and reduce, if it is to be whole."""
        async with asyncio.timeout(RECOVERY_S):
            for caller, to in (("ps", "m"), ("m", "ps"), ("laptop", "m")):
                worker = getattr(self, caller)
                assert await worker.peer(to).call(add, 1, 2) == 3
            assert await self.ps.peer(1).call(add, 3, 4) == 7
            if not is_whole:
                return
            assert await self.m.peer("laptop").call(add, 5, 6) == 11
            items = [item async for item in self.m.peer("ps").stream(count_to, 5)]
            assert items == list(range(5))
            tensors = [torch.ones(4) for _ in self._groups]
            pairs = zip(self._groups, tensors, strict=True)
            await asyncio.gather(*(group.all_reduce(each) for group, each in pairs))
            assert all(each.tolist() == [3.0] * 4 for each in tensors)

    async def serve(self) -> None:
        """Bring new weights to the replica, and let the router call it.

        A member may bring weights as well: while it is there, one of them waits.
        """
        net = torch.nn.Linear(2, 1)
        publication = await self._publisher.publish(net)
        assert await self._publisher.versions() == {"ps": publication.version}
        assert await self._router.call(add, 1, 2) == 3
        with self._served.batch() as served:
            assert torch.equal(served.model.weight, net.weight)

    async def train(self, meanwhile: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Make a step, and something else between its two halves."""
        with acting_as(self.ps):
            async with context() as ctx:
                self.facts.ids[-1] = ctx.id
                y = await self.layer.rpc_async().forward(torch.ones(3))
                await meanwhile()
                await backward(ctx, [y.sum()])
                await self._optimizer.step(ctx)
            self._steps += 1
            weight = await self.layer.rpc_async().value()
        assert weight.tolist() == [1.0 - 0.5 * self._steps] * 3, weight

    def begin(
        self,
        action: Coroutine[Any, Any, Any],
        allowed: type[Any] | tuple[type[Any], ...],
    ) -> None:
        """Let an honest worker do something with the liar; its errors are its own."""

        async def within_limit() -> None:
            try:
                async with asyncio.timeout(RECOVERY_S / 2):
                    await action
            except TimeoutError as error:
                if type(error) is TimeoutError:
                    self.complaints.texts.append(f"it hangs: {action}")
            except allowed:
                pass
            except Exception as error:  # noqa: BLE001  (it is a finding)
                self.complaints.texts.append(f"honest: {_trace_of(error)}")

        task = self.loop.create_task(within_limit())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- what must hold --------------------------------------------------------------

    async def recovered(self) -> list[str]:
        """Wait until nothing of a liar is left; return what is wrong."""
        waited_s = 0.0
        while (wrong := self._wrong()) and waited_s < RECOVERY_S:
            await asyncio.sleep(STEP_S)
            waited_s += STEP_S
            if waited_s in (STEP_S * 5, RECOVERY_S):
                gc.collect()
        return wrong + self.complaints.take()

    def _wrong(self) -> list[str]:
        wrong = [f"it goes on: {task}" for task in self._tasks]
        lives = {worker.name: (worker.incarnation, True) for worker in self.all}
        now = self._tables()
        for worker in self.all:
            table = worker.parts.service("membership").table  # type: ignore[attr-defined]
            known = {
                record.name: (record.incarnation, True) for record in table.records
            }
            if known != lives:
                wrong.append(f"{worker.name} knows {table.records}")
            before, tables = self._before[worker.name], now[worker.name]
            grown = {
                name: (before[name], count)
                for name, count in tables.items()
                if count > before[name]
            }
            if grown:
                wrong.append(f"{worker.name} has more than before: {grown}")
        return wrong

    def _tables(self) -> dict[str, dict[str, int]]:
        return {worker.name: _tables_of(worker) for worker in self.all}

    # --- the liar --------------------------------------------------------------------

    def dial(self, to: str, hello: Hello, *, is_guest: bool) -> HostileEnd:
        """Connect to an honest worker."""
        key, ticket = SECRET.encode(), b""
        if is_guest:
            key, ticket, to = self.token.key, self.token.ticket, "ps"
        handshake = Handshake(Role.DIALER, key, os.urandom(NONCE_BYTES), ticket=ticket)
        end = HostileEnd(self.loop, handshake, hello)
        self.hub.connect(Address("mem", to), end.connection)
        return end

    def acceptor(self, hello: Hello) -> HostileEnd:
        """Return the end that an honest worker dials."""
        nonce = os.urandom(NONCE_BYTES)
        handshake = Handshake(Role.ACCEPTOR, SECRET.encode(), nonce)
        return HostileEnd(self.loop, handshake, hello)


def _tables_of(worker: Worker) -> dict[str, int]:
    """Count what a worker keeps because of others."""
    service: Any = worker.parts.service
    # A worker may have one to itself, from the first call of itself on.
    links = [
        link for link in worker.parts.directory.links if link.peer.name != worker.name
    ]
    groups = service("collectives")._groups  # noqa: SLF001  (what is to be checked)
    budget = worker.parts.inbound_credit.budget
    return {
        "links": len(links),
        "calls": sum(len(link.pending) + len(link.served) for link in links),
        "active": worker.parts.active,
        "tasks": len(worker.parts.tasks),
        "contexts": service("autograd").open_contexts,
        "passes": service("autograd").running_passes,
        "optimizers": optimizers_here(service("optim")),
        "steps": turns_of(service("optim")),
        "groups": len(groups),
        "held bytes": budget.held_bytes,
        "waiting": budget.waiting,
        "observers": len(worker.parts.directory.observers._open),  # noqa: SLF001
        **{f"references {k}": n for k, n in service("rref").counts().items()},
    }
