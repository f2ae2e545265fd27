"""News go once along the ring, many in one message, past those who are out of reach."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrpc.core.membership.gossip import BATCH_S, Gossip
from asyncrpc.core.membership.machine.membership import (
    Membership,
)
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.core.membership.machine.ring import place_of
from asyncrpc.core.membership.messages import SERVICE, read_news
from asyncrpc.errors import WorkerLostError
from tests.unit.core.membership.peers import Company, run


def begun(company: Company) -> tuple[Gossip, Membership]:
    peers: Any = company
    gossip = Gossip(company, peers, lambda: BATCH_S)
    records = [Record(peer.member, 1) for peer in company.known]
    table = Membership(records[0])
    table.begin(records, company.loop.time())
    gossip.begin(table)
    return gossip, table


def news_sent(company: Company) -> dict[str, list[Any]]:
    """Return the records that each peer was told, by its name."""
    news: dict[str, list[Any]] = {}
    for peer in company.known:
        for service, method, (items,) in peer.made.sent:
            assert (service, method) == (SERVICE, "news")
            names = [read_news(item).record.name for item in items]
            news.setdefault(peer.member.name, []).append(names)
    return news


def test_simultaneous_news_share_one_message() -> None:
    async def main() -> None:
        company = Company("a", "b")
        company.connect("b")
        gossip, table = begun(company)
        records = list(table.records)
        for record in records:
            gossip.announce(record)
        assert news_sent(company) == {}
        await asyncio.sleep(2 * BATCH_S)
        assert news_sent(company) == {
            "b": [[member_record.name for member_record in records]]
        }
        assert gossip.sent == 1

    run(main())


def test_repeated_news_are_passed_on_once() -> None:
    async def main() -> None:
        company = Company("a", "b")
        company.connect("b")
        gossip, table = begun(company)
        for _ in range(3):
            gossip.announce(table.me)
            await asyncio.sleep(2 * BATCH_S)
        assert news_sent(company) == {"b": [["a"]]}

    run(main())


def test_part_of_an_unreachable_worker_is_told_by_another() -> None:
    async def main() -> None:
        names = [f"w{number}" for number in range(12)]
        company = Company(*names)
        company.connect(*names[1:])
        gossip, table = begun(company)
        routes = dict(table.alive.routes("w0", place_of("w0")))
        past = {route: table.alive.route_past(route, routes[route]) for route in routes}
        gone, (instead, _) = next((name, to) for name, to in past.items() if to)
        company.find(gone).link = None
        company.fail(gone, WorkerLostError("gone", to="x", function="connect"))
        gossip.announce(table.me)
        await asyncio.sleep(10 * BATCH_S)
        assert set(news_sent(company)) == routes.keys() - {gone} | {instead}

    run(main())


def test_closed_gossip_sends_nothing() -> None:
    async def main() -> None:
        company = Company("a", "b")
        company.connect("b")
        gossip, table = begun(company)
        gossip.announce(table.me)
        gossip.close()
        gossip.announce(table.me)
        await asyncio.sleep(2 * BATCH_S)
        assert news_sent(company) == {}

    run(main())
