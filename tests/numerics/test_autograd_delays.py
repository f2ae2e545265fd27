"""Contexts and passes on a network that delays and crashes, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import asyncrpc
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests import raw_messages
from tests.numerics.stateful_objects import (
    all_released,
    ask,
    group_of,
    leaf,
    open_contexts,
)


class TestDelays:
    """Each worker is a host of its own; without a rule, messages take no time."""

    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_answer_after_the_end_of_its_context_is_a_plain_tensor(self) -> None:
        """The end and the answer cross on the way."""
        network = Network(0)
        async with group_of(2, network) as (workers, keepers):
            async with context():
                call = ask(keepers["b"], "times_after", 1.0, leaf())
                running = asyncio.create_task(call)
                await asyncio.sleep(0.5)
                network.between("a", "b").clog(2.0)
            answer = await running
            assert answer.grad_fn is None
            assert open_contexts(workers[0]) == 0
            await all_released(workers)

    async def test_gradients_are_whole_though_the_end_is_known_late(self) -> None:
        """The end reaches `c` by way of `b`; a question there waits for it."""
        network = Network(0)
        loop = asyncio.get_running_loop()
        async with group_of(3, network) as (_, keepers), context() as ctx:
            y = await ask(keepers["b"], "relay", keepers["c"], "times", leaf())
            await backward(ctx, y.sum())
            began_s = loop.time()
            network.between("b", "c").clog(1.0)
            report = await ask(keepers["c"], "report")
            assert loop.time() - began_s >= 1.0
            assert report.gradients[0] is not None

    async def test_a_worker_that_crashes_fails_the_pass_and_is_named(self) -> None:
        network = Network(0)
        async with group_of(3, network) as (workers, keepers), context() as ctx:
            x = leaf()
            y = await ask(keepers["b"], "times", x)
            z = await ask(keepers["c"], "times", y)
            network.between("a", "c").clog(1.0)
            running = asyncio.create_task(backward(ctx, z.sum(), retain_graph=True))
            await asyncio.sleep(0.5)
            network.crash("c")
            with pytest.raises(asyncrpc.errors.BackwardFailedError) as caught:
                await running
            assert caught.value.worker == "c"
            assert isinstance(caught.value.__cause__, asyncrpc.WorkerLostError)
            await backward(ctx, y.sum())
            assert x in get_gradients(ctx)
            await workers[2].shutdown(drain_timeout_s=0)

    async def test_pass_cancelled_while_asking_for_its_delay_has_ended(self) -> None:
        """An enclosing deadline passes at about the same time."""
        network = Network(0)
        async with group_of(2, network) as (workers, keepers):
            async with context() as ctx:
                y = await ask(keepers["b"], "times", leaf())
                network.between("a", "b").clog(1.0)
                with pytest.raises(TimeoutError) as caught:
                    async with asyncio.timeout(0.5):
                        await backward(ctx, y.sum(), timeout_s=0.2)
                assert type(caught.value) is TimeoutError
                assert (await ask(keepers["b"], "report")).gradients == [None, None]
            await all_released(workers)

    async def test_passes_of_a_worker_that_crashes_end_with_it(self) -> None:
        """Nobody else will say that they are over, and who asks would wait."""
        network = Network(0)
        async with group_of(3, network) as (workers, keepers), context() as ctx:
            _, b, c = workers
            await ask(keepers["b"], "relay", keepers["c"], "times", leaf())
            service: Any = c.parts.service("autograd")
            sent = service.state(ctx).sent
            message = next(key for key, about in sent.items() if about.to == b.id)
            link = await b.parts.link_to("c")
            begun: list[object] = [
                *ctx.id,
                b.incarnation,
                1 << 40,
                "b",
                *(False, False, False),
                [message.serial, 0],  # whose gradient never comes
                [],
                *(None, None, None),
            ]
            value = [[], {"fields": begun}]
            await raw_messages.request(link, "autograd", "advance", value)
            asked = asyncio.create_task(ask(keepers["c"], "report"))
            await asyncio.sleep(1.0)
            assert not asked.done()
            network.crash("b")
            assert (await asked).gradients == [None, None]
            await b.shutdown(drain_timeout_s=0)
