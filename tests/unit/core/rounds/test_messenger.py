"""A message says what holds when it is written, and each peer gets the newest."""

from __future__ import annotations

import asyncio

from asyncrpc.core.rounds.messenger import (
    LAST_MESSAGE_S,
    PeerMessenger,
    name_of,
    rank_of,
)
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.errors import WorkerLostError
from tests import raw_messages
from tests.unit.core.membership.peers import Company, run


class Sender:
    """Writes a number that the test changes."""

    def __init__(self, company: Company) -> None:
        self.number = 0
        self.unreachable: list[int] = []
        self.messenger = PeerMessenger(
            company, company, self._write, self._on_unreachable
        )

    def _write(self, link: PeerLink) -> None:
        raw_messages.tell(link, "test", "number", self.number)

    def _on_unreachable(self, rank: int, _why: str) -> None:
        self.unreachable.append(rank)


def numbers(company: Company, name: str) -> list[object]:
    return [value for _, _, value in company.find(name).made.sent]


LOST = WorkerLostError("gone", to="b", function="connect")


def test_message_over_a_link_is_written_at_once() -> None:
    async def main() -> None:
        company = Company("a", "b")
        company.connect("b")
        sender = Sender(company)
        sender.messenger.send(1)
        assert numbers(company, "b") == [0]
        await sender.messenger.wait_sent()

    run(main())


def test_message_that_waited_for_a_link_is_current_and_sent_once() -> None:
    async def main() -> None:
        company = Company("a", "b")
        sender = Sender(company)
        for sender.number in range(5):
            sender.messenger.send(1)
        waiting = asyncio.create_task(sender.messenger.wait_sent())
        await company.settle()
        assert not waiting.done()
        company.connect("b")
        await waiting
        assert numbers(company, "b") == [4]

    run(main())


def test_unreachable_peer_is_reported_after_a_while() -> None:
    """It may have left in order, and its last message may be on its way."""

    async def main() -> None:
        company = Company("a", "b")
        sender = Sender(company)
        sender.messenger.send(1)
        company.fail("b", LOST)
        await asyncio.sleep(0.9 * LAST_MESSAGE_S)
        assert sender.unreachable == []
        await asyncio.sleep(0.2 * LAST_MESSAGE_S)
        assert sender.unreachable == [1]

    run(main())


def test_unreachable_peer_that_was_seen_leaving_is_reported_at_once() -> None:
    async def main() -> None:
        company = Company("a", "b")
        sender = Sender(company)
        sender.messenger.connect(1, was_seen_going=True)
        company.fail("b", LOST)
        await asyncio.sleep(0.01)
        assert sender.unreachable == [1]
        assert numbers(company, "b") == []

    run(main())


def test_connecting_sends_nothing() -> None:
    async def main() -> None:
        company = Company("a", "b")
        sender = Sender(company)
        sender.messenger.connect(1)
        company.connect("b")
        await company.settle()
        assert numbers(company, "b") == []
        assert not company.tasks

    run(main())


def test_cancelled_messenger_sends_nothing_more() -> None:
    async def main() -> None:
        company = Company("a", "b")
        sender = Sender(company)
        sender.messenger.send(1)
        await company.settle()
        sender.messenger.cancel()
        company.connect("b")
        await company.settle()
        assert numbers(company, "b") == []
        await sender.messenger.wait_sent()

    run(main())


def test_dial_cancelled_before_it_began_is_not_awaited() -> None:
    async def main() -> None:
        company = Company("a", "b")
        sender = Sender(company)
        sender.messenger.send(1)
        for task in company.tasks:
            task.cancel()
        await sender.messenger.wait_sent()

    run(main())


def test_forgotten_peer_has_a_placeholder_name_and_no_rank() -> None:
    async def main() -> None:
        company = Company("a", "b")
        assert (name_of(company, 1), rank_of(company, "b")) == ("b", 1)
        company.forget("b")
        assert (name_of(company, 1), rank_of(company, "b")) == ("rank 1", -1)

    run(main())
