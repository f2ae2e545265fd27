"""Right and wrong uses in any order: the right ones work, the wrong ones are refused.

Hypothesis plays programs on a group of workers: it calls, streams, refers, trains and
reduces, and in between makes mistakes, here and at the callee.  Whatever came before,
what is right gives its result and what is wrong its error; no link ends; and when all
is let go, the workers keep nothing.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import asyncrpc
from asyncrpc import AsyncRpcError, CallError, RemoteError, UsageError, Worker, autograd
from asyncrpc.errors import CollectiveError, EncodeError, RRefDeletedError
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as
from tests.integration.misuse.traffic import (
    bounce,
    count_up,
    make_parameter,
    scale,
    tables_there,
)
from tests.integration.misuse.uses_values import CANNOT_TRAVEL
from tests.integration.misuse.wrong import WRONG, RaisesInReduce

T = TypeVar("T")
HANGS_AFTER_S = 60.0
IS_KEPT_AFTER_S = 240.0  # to count once takes seconds on a slow machine
# Of those values the ones that need nothing but themselves.
BY_THEMSELVES = sorted(
    kind
    for kind in CANNOT_TRAVEL
    if not any(of in kind for of in ("worker", "reference", "loop", "coroutine"))
    and kind not in ("too large", "too deep")  # which take half a second each
)


class Unreadable:
    """Raises where it arrives."""

    def __reduce__(self) -> Any:
        return fail, ("at the reader",)


def fail(text: str) -> None:
    raise ValueError(text)


def fail_hard(text: str) -> None:
    raise SystemExit(text)


async def fail_later(text: str) -> None:
    await asyncio.sleep(0)
    raise ValueError(text)


def give_unsendable() -> Any:
    return RaisesInReduce()


def give_unreadable() -> Any:
    return Unreadable()


def fail_after(items: int) -> Any:
    yield from range(items)
    raise ValueError("after the items")


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def fail(self) -> None:
        raise ValueError("a method")


class Mixture(RuleBasedStateMachine):
    """Programs of two workers."""

    workers_count = 2
    counters = Bundle("counters")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.cluster = Cluster(self.workers_count)
        self.workers = self.run(self.cluster.__aenter__())
        self.rounds = 0

    def run(self, work: Coroutine[Any, Any, T], *, limit_s: float = HANGS_AFTER_S) -> T:
        async def limited() -> T:
            async with asyncio.timeout(limit_s):
                return await work

        return self.loop.run_until_complete(limited())

    async def refused(
        self,
        kinds: type[BaseException] | tuple[type[BaseException], ...],
        text: str,
        attempt: Callable[[], Any],
    ) -> None:
        """See that a mistake is refused, twice in the same way."""
        for _ in range(2):
            with pytest.raises(kinds, match=text):
                await attempt()

    def two(self, data: st.DataObject) -> tuple[Worker, asyncrpc.Peer]:
        """Return a worker, and a peer of it, which may be itself."""
        caller = data.draw(st.sampled_from(self.workers), label="caller")
        callee = data.draw(st.sampled_from(self.workers), label="callee")
        return caller, caller.peer(callee.name)

    @initialize()
    def connect(self) -> None:
        async def all_to_all() -> None:
            for worker in self.workers:
                for other in self.workers:
                    assert await worker.peer(other.name).call(len, "ab") == 2
            self.groups = [
                asyncrpc.Group(worker, name="mixture") for worker in self.workers
            ]
            await asyncio.gather(*(group.barrier() for group in self.groups))
            self.links = {
                link: None
                for worker in self.workers
                for link in worker.parts.directory.links
            }

        self.run(all_to_all())

    # --- what is right

    @rule(data=st.data(), number=st.integers(0, 9))
    def call(self, data: st.DataObject, number: int) -> None:
        _, peer = self.two(data)

        async def work() -> None:
            assert await peer.call(bounce, number) == number
            assert await peer.call(max, number, 0) == number
            sent = torch.full((number,), 2.0)
            assert torch.equal(await peer.call(torch.neg, sent), -sent)

        self.run(work())

    @rule(data=st.data(), items=st.integers(0, 9), taken=st.integers(0, 9))
    def stream(self, data: st.DataObject, items: int, taken: int) -> None:
        _, peer = self.two(data)

        async def work() -> None:
            stream = peer.stream(count_up, items)
            received = []
            async for item in stream:
                received.append(item)
                if len(received) >= taken:
                    break
            await stream.aclose()
            assert received == list(range(min(items, max(taken, 1))))

        self.run(work())

    @rule(target=counters, data=st.data(), start=st.integers(0, 9))
    def refer(self, data: st.DataObject, start: int) -> Any:
        caller, peer = self.two(data)

        async def work() -> Any:
            with acting_as(caller):
                rref = peer.remote(Counter, start)
                assert (await rref.to_here()).count == start
                return rref, [start]

        return self.run(work())

    @rule(counter=counters, number=st.integers(0, 9))
    def use_a_reference(self, counter: Any, number: int) -> None:
        rref, count = counter

        async def work() -> None:
            count[0] += number
            assert await rref.rpc_async().add(number) == count[0]

        self.run(work())

    @rule(counter=consumes(counters))
    def release(self, counter: Any) -> None:
        rref, _ = counter
        rref.release()

        async def work() -> None:
            await self.refused(RRefDeletedError, "release", rref.to_here)
            await self.refused(
                RRefDeletedError, "release", lambda: rref.rpc_async().add(1)
            )

        self.run(work())

    @rule()
    def reduce(self) -> None:
        async def work() -> None:
            self.rounds += 1
            reduced = await asyncio.gather(
                *(group.all_reduce(torch.full((3,), 1.0)) for group in self.groups)
            )
            for tensor in reduced:
                assert tensor.tolist() == [float(len(self.groups))] * 3

        self.run(work())

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        caller, peer = self.two(data)

        async def work() -> None:
            with acting_as(caller):
                parameter = peer.remote(make_parameter)
                optimizer = await DistributedOptimizer("SGD", [parameter], lr=0.1)
                async with autograd.context() as context:
                    loss = await peer.call(scale, parameter, torch.ones(4))
                    await autograd.backward(context, [loss])
                    assert (await optimizer.step(context)).is_applied
                assert (await parameter.to_here()).tolist() == pytest.approx([0.9] * 4)

        self.run(work())

    # --- what is wrong

    @rule(data=st.data(), kind=st.sampled_from(BY_THEMSELVES))
    def send_what_cannot_travel(self, data: st.DataObject, kind: str) -> None:
        _, peer = self.two(data)
        make: Any = WRONG[kind]

        async def work() -> None:
            text = r"args\[0\]"
            await self.refused(EncodeError, text, lambda: peer.call(len, make(None)))
            with pytest.raises(EncodeError, match=text):
                peer.remote(len, make(None))
            with pytest.raises(EncodeError, match=text):
                await anext(peer.stream(count_up, make(None)))

        self.run(work())

    @rule(data=st.data(), wrong=st.sampled_from([None, 5, "text", [len], 2.5]))
    def call_what_is_not_callable(self, data: st.DataObject, wrong: Any) -> None:
        _, peer = self.two(data)

        async def work() -> None:
            text = "function must be callable"
            await self.refused(UsageError, text, lambda: peer.call(wrong, 1))

        self.run(work())

    @rule(
        data=st.data(),
        function=st.sampled_from([fail, fail_hard, fail_later]),
        text=st.sampled_from([".", "once", "n" * 100_000]),
    )
    def call_what_fails(self, data: st.DataObject, function: Any, text: str) -> None:
        _, peer = self.two(data)
        self.run(
            self.refused(RemoteError, text[:10], lambda: peer.call(function, text))
        )

    @rule(data=st.data())
    def get_what_cannot_come_back(self, data: st.DataObject) -> None:
        _, peer = self.two(data)

        async def work() -> None:
            await self.refused(
                EncodeError, "cannot be", lambda: peer.call(give_unsendable)
            )
            await self.refused(CallError, "reader", lambda: peer.call(give_unreadable))
            await self.refused(
                CallError, "reader", lambda: peer.call(bounce, Unreadable())
            )

        self.run(work())

    @rule(data=st.data(), items=st.integers(0, 40))
    def stream_what_fails(self, data: st.DataObject, items: int) -> None:
        _, peer = self.two(data)

        async def work() -> None:
            stream = peer.stream(fail_after, items)
            assert [await anext(stream) for _ in range(items)] == list(range(items))
            with pytest.raises(RemoteError, match="after the items"):
                await anext(stream)
            function: Any = count_up
            await self.refused(
                TypeError, "argument", lambda: anext(peer.stream(function))
            )

        self.run(work())

    @rule(counter=counters)
    def misuse_a_reference(self, counter: Any) -> None:
        rref, count = counter

        async def work() -> None:
            proxy = rref.rpc_async()
            await self.refused(RemoteError, "a method", proxy.fail)
            await self.refused(AttributeError, "nothing", proxy.nothing)
            await self.refused(TypeError, "argument", proxy.add)
            assert await proxy.add(0) == count[0]

        self.run(work())

    @rule(counter=counters, data=st.data())
    def send_a_reference_of_another(self, counter: Any, data: st.DataObject) -> None:
        rref, _ = counter
        caller, peer = self.two(data)
        if caller.parts.references is rref._service:  # noqa: SLF001  (whose handle it is)
            return
        self.run(
            self.refused(EncodeError, r"args\[0\]", lambda: peer.call(bounce, rref))
        )

    @rule(data=st.data())
    def reduce_what_differs(self, data: st.DataObject) -> None:
        odd = data.draw(st.sampled_from(range(len(self.groups))), label="odd one")

        async def work() -> None:
            tensors = [
                torch.ones(4 if at == odd else 3) for at in range(len(self.groups))
            ]
            done = await asyncio.gather(
                *(
                    group.all_reduce(tensor)
                    for group, tensor in zip(self.groups, tensors, strict=True)
                ),
                return_exceptions=True,
            )
            assert {type(result) for result in done} == {CollectiveError}

        self.run(work())
        self.reduce()

    @rule(data=st.data())
    def train_wrongly(self, data: st.DataObject) -> None:
        caller, peer = self.two(data)

        async def work() -> None:
            with acting_as(caller):
                parameter = peer.remote(make_parameter)
                optimizer = DistributedOptimizer("SGD", [parameter], lr=0.1)
                async with autograd.context() as context:
                    loss = await peer.call(scale, parameter, torch.ones(4))
                    for roots in (None, 5, [None], [1.0], [torch.ones(1)]):
                        with pytest.raises((UsageError, AsyncRpcError)):
                            await autograd.backward(context, roots)  # type: ignore[arg-type]
                    with pytest.raises(UsageError):
                        await optimizer.step()
                    await autograd.backward(context, [loss])
                    assert (await optimizer.step(context)).is_applied
                with pytest.raises(AsyncRpcError):
                    await autograd.backward(context, [loss])
                with pytest.raises(AsyncRpcError):
                    await optimizer.step(context)

        self.run(work())

    @rule(data=st.data(), turns=st.integers(0, 5))
    def cancel(self, data: st.DataObject, turns: int) -> None:
        _, peer = self.two(data)

        async def work() -> None:
            task = asyncio.ensure_future(peer.call(bounce, torch.ones(20_000)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

        self.run(work())

    # --- what holds

    @invariant()
    def no_link_has_ended(self) -> None:
        if hasattr(self, "links"):
            assert not [link for link in self.links if link.is_lost]

    def teardown(self) -> None:
        self.left: dict[str, int] = {}
        self.seen_before = self._unanswered()
        try:
            self.run(self._let_go(), limit_s=IS_KEPT_AFTER_S)
        except TimeoutError:
            raise AssertionError(
                f"kept for {IS_KEPT_AFTER_S} s: {self.left}; calls that are not "
                f"answered, before and after: {self.seen_before} and "
                f"{self._unanswered()}"
            ) from None
        finally:
            self.run(self.cluster.__aexit__(None, None, None))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    async def _let_go(self) -> None:
        for value in self.bundles.get("counters", []):
            self.names_to_values[value.name][0].release()
        for group in getattr(self, "groups", []):
            group.close()
        while too_much := await self._kept_too_much():
            self.left = too_much  # what is shown if it stays
            await asyncio.sleep(0)

    def _unanswered(self) -> list[str]:
        """Say which calls have got no answer, and how often a link was resumed."""
        return [
            f"{worker.name} to {link.peer.name}: {call!r}; resumed: "
            f"{worker.counters.connections_resumed}"
            for worker in self.workers
            for link in worker.parts.directory.links
            for call in link.pending
            if not call.function.startswith("membership.")
        ]

    async def _kept_too_much(self) -> dict[str, int]:
        """Count what the workers keep but for the calls that ask, and idle memory.

        To count takes seconds on a slow machine; meanwhile workers compare what they
        know of the members, again and again.
        """
        asks = dict.fromkeys(("served calls", "active calls"), 1)
        kept = await self._kept()
        kept["pending calls"] = len(self._unanswered())
        return {
            what: count
            for what, count in kept.items()
            if count != asks.get(what, 0) * len(self.workers)
            and not what.startswith(("bytes held", "received memory"))
        }

    async def _kept(self) -> dict[str, int]:
        gc.collect()
        counts: dict[str, int] = {}
        for worker in self.workers:
            for what, count in (
                await worker.peer(worker.name).call(tables_there)
            ).items():
                counts[what] = counts.get(what, 0) + count
        return counts


class MixtureOfFour(Mixture):
    """Programs of four workers."""

    workers_count = 4


@pytest.mark.parametrize("machine", [Mixture, MixtureOfFour])
@pytest.mark.slow
def test_uses_in_any_order_work_or_are_refused(machine: type[Mixture]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=100,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
