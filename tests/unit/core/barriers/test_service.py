"""A message says what holds when it is written; an unreachable neighbour is reported.

The second of two workers is only known: a test ends the dials to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asyncrpc.core.barriers.messages import Key, Purpose
from asyncrpc.core.barriers.service import LAST_MESSAGE_S, STALL_S, BarrierService
from asyncrpc.errors import WorkerLostError
from tests.unit.core.membership.peers import Company, run

KEY = Key(Purpose.RENDEZVOUS, "tag", (1, 0))  # the first worker is the child
LOST = WorkerLostError("gone", to="b", function="connect")
Play = Callable[[Company, BarrierService], Awaitable[None]]


def played(play: Play) -> None:
    """Let the first of two workers wait for the second, and then end."""

    async def main() -> None:
        company = Company("a", "b")
        peers: Any = company
        await play(company, BarrierService(peers, company, peers))

    run(main())


def methods(company: Company) -> list[str]:
    return [method for _, method, _ in company.find("b").made.sent]


def test_a_message_for_a_link_is_never_out_of_date_and_sent_once() -> None:
    async def play(company: Company, service: BarrierService) -> None:
        joining = asyncio.create_task(service.participant(KEY).join(None))
        await asyncio.sleep(5 * STALL_S)
        service.participant(KEY).give_up("had no time")
        await joining
        company.connect("b")
        await company.settle()
        assert methods(company) == ["failed"]

    played(play)


@pytest.mark.parametrize("patience_s", [0.0, LAST_MESSAGE_S])
def test_an_unreachable_neighbour_fails_the_round_after_a_while(
    patience_s: float,
) -> None:
    """It may have left in order, and its last message may be on its way."""

    async def play(company: Company, service: BarrierService) -> None:
        part = service.participant(KEY)
        part.connect(1, patience_s)
        joining = asyncio.create_task(part.join(None))
        await company.settle()
        company.fail("b", LOST)
        if patience_s:
            await asyncio.sleep(0.9 * patience_s)
            assert part.series.is_waiting
        await asyncio.sleep(0.2 * LAST_MESSAGE_S)
        failure = await joining
        assert failure is not None
        assert failure.missing == (1,)

    played(play)


def test_a_dial_that_is_cancelled_before_it_began_is_forgotten() -> None:
    async def play(company: Company, service: BarrierService) -> None:
        part = service.participant(KEY)
        part.send(1)
        for task in company.tasks:
            task.cancel()
        await company.settle()
        part.send(1)
        company.connect("b")
        await company.settle()
        assert methods(company) == ["arrivals"]

    played(play)


def test_forgotten_workers_are_named_by_rank() -> None:
    async def play(company: Company, service: BarrierService) -> None:
        assert (service.name_of(1), service.rank_of("b")) == ("b", 1)
        company.forget("b")
        assert (service.name_of(1), service.rank_of("b")) == ("rank 1", -1)

    played(play)
