"""So many dials at a time: the others wait for their turn, and none for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrpc.core.links.dialer import (
    CONNECT_TURN_S,
    DialTurn,
    DialTurns,
)
from asyncrpc.core.links.machine.dial_window import WINDOW_FIRST, DialWindow
from asyncrpc.errors import WorkerLostError
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.unit.core.links.directories import (
    TIMES,
    Host,
    PlainLink,
    closed,
    hosts,
    now_s,
    run,
    until,
)

loops = {"sim": SimLoop}  # of the coroutine tests here

MANY = [f"peer{number}" for number in range(12 * WINDOW_FIRST)]


class Dials:
    """Dials that take turns, and end when the test wants it.

    Attributes:
        begun: their numbers, as their turns came.
        held: whether each had a turn when it began.
        ends: end them.
        wakes: let them begin without a turn.
    """

    def __init__(self, at_once: int) -> None:
        window = DialWindow()
        window.size = at_once
        self.turns = DialTurns("4", window)
        self.begun: list[int] = []
        self.held: dict[int, bool] = {}
        self.ends = [asyncio.Event() for _ in range(9)]
        self.wakes = [asyncio.Event() for _ in range(9)]
        self.tasks = [asyncio.create_task(self.dial(number)) for number in range(9)]

    async def dial(self, number: int) -> None:
        with self.turns.dial_turn(str(number), self.wakes[number]) as turn:
            await turn.begun()
            self.begun.append(number)
            self.held[number] = turn.is_held
            await self.work(number, turn)

    async def work(self, number: int, turn: DialTurn) -> None:
        del turn
        await self.ends[number].wait()

    async def settle(self) -> None:
        for _ in range(99):
            await asyncio.sleep(0)

    async def end(self, *numbers: int) -> None:
        for number in numbers:
            self.ends[number].set()
        await self.settle()


# As worker "4" dials the others, and itself.
ORDER = [4, 5, 6, 7, 8, 0, 1, 2, 3]


async def test_turns_are_given_in_the_order_of_names() -> None:
    dials = Dials(2)
    await dials.settle()
    assert dials.begun == ORDER[:2]
    await dials.end(4)
    assert dials.begun == ORDER[:3]
    await dials.end(*range(9))
    assert dials.begun == ORDER
    await asyncio.gather(*dials.tasks)


async def test_dial_that_became_needless_takes_no_turn() -> None:
    dials = Dials(1)
    await dials.settle()
    dials.wakes[3].set()
    await dials.settle()
    assert (dials.begun, dials.held) == ([4, 3], {4: True, 3: False})
    await dials.end(*range(9))
    assert sorted(dials.begun) == list(range(9))
    assert all(held for number, held in dials.held.items() if number != 3)
    await asyncio.gather(*dials.tasks)


@pytest.mark.parametrize("when", ["turn held", "turn awaited", "turn arriving"])
async def test_cancelled_dial_keeps_no_turn(when: str) -> None:
    dials = Dials(1)
    await dials.settle()
    first, second = (dials.tasks[number] for number in ORDER[:2])
    match when:
        case "turn held":
            first.cancel()
        case "turn awaited":
            second.cancel()
        case "turn arriving":  # given in the moment in which the task is cancelled
            first.add_done_callback(lambda _: second.cancel())
            dials.ends[ORDER[0]].set()
    await dials.settle()
    await dials.end(*range(9))
    await asyncio.gather(*dials.tasks, return_exceptions=True)
    assert dials.begun[-7:] == ORDER[2:]
    with dials.turns.dial_turn("b", asyncio.Event()) as turn:
        await turn.begun()
        assert turn.is_held


def test_slow_dial_lets_the_next_one_begin() -> None:
    class Slow(Dials):
        async def work(self, number: int, turn: DialTurn) -> None:
            with turn.connecting():
                await asyncio.sleep(100 if number == 4 else CONNECT_TURN_S / 2)

    async def main() -> None:
        dials = Slow(1)
        await dials.settle()
        assert dials.begun == ORDER[:1]
        await asyncio.sleep(CONNECT_TURN_S + 0.01)
        assert dials.begun == ORDER[:2]
        await asyncio.gather(*dials.tasks)
        assert dials.begun == ORDER
        assert now_s() == pytest.approx(100)
        with dials.turns.dial_turn("b", asyncio.Event()) as turn:
            await turn.begun()
            assert turn.is_held  # the one turn that there is: given back once
            dials.wakes[0].clear()
            other = asyncio.create_task(dials.dial(0))
            await dials.settle()
            assert dials.begun == ORDER
            other.cancel()

    run(main())


async def test_dial_ends_in_order_after_the_loop_has_closed_its_generators() -> None:
    dials = Dials(1)
    await dials.settle()
    await asyncio.get_running_loop().shutdown_asyncgens()
    for task in dials.tasks:
        task.cancel()
    ends = await asyncio.gather(*dials.tasks, return_exceptions=True)
    assert {type(end) for end in ends} == {asyncio.CancelledError}


# --- a worker's dials ----------------------------------------------------------------


async def test_concurrent_dials_of_a_worker_are_limited() -> None:
    a, *others = await hosts(Network(1), "a", *MANY)
    under_way: list[int] = []
    inner: Any = a.directory.connections
    make = inner.make

    def counted(*args: Any) -> Any:
        under_way.append(len(under_way) + 1 - len(a.directory.links))
        return make(*args)

    inner.make = counted
    await asyncio.gather(*(a.directory.open_link(name) for name in MANY))
    assert len(under_way) == len(MANY)
    assert under_way[:WINDOW_FIRST] == list(range(1, WINDOW_FIRST + 1))
    # Each that answers lets two begin, its own successor and one more.
    assert all(
        count <= WINDOW_FIRST + answered
        for answered, count in enumerate(under_way[WINDOW_FIRST:], start=1)
    )
    assert len(a.directory.links) == len(MANY)
    await closed(a, *others)


async def test_all_workers_may_dial_one_another_at_once() -> None:
    some = await hosts(Network(1), *MANY)
    await asyncio.gather(
        *(
            host.directory.open_link(name)
            for host in some
            for name in MANY
            if name != host.name
        )
    )
    assert {len(host.directory.links) for host in some} == {len(MANY) - 1}
    assert all(host.lost == [] for host in some)
    await closed(*some)


async def dial_the_gone(
    network: Network, a: Host, names: list[str]
) -> list[asyncio.Task[PlainLink]]:
    """Let a worker dial peers that do not answer, until their turns are taken."""
    for name in names:
        network.between(a.name, name).partition()
    dials = [asyncio.create_task(a.directory.open_link(name)) for name in names]
    await asyncio.sleep(0.001)
    return dials


async def test_lost_peers_delay_other_dials_briefly() -> None:
    network = Network(1)
    a, b, *gone = await hosts(network, "a", "b", *MANY)
    dials = await dial_the_gone(network, a, MANY)
    await a.directory.open_link("b")
    assert now_s() < CONNECT_TURN_S * (len(MANY) / WINDOW_FIRST) + 0.1
    for dial in dials:
        with pytest.raises(WorkerLostError, match="no answer in"):
            await dial
    await closed(a, b, *gone)


async def test_waiting_dial_takes_a_connection_made_by_the_peer() -> None:
    """Which has no turn to wait for."""
    network = Network(1)
    a, b, *gone = await hosts(network, "a", "b", *MANY)
    dials = await dial_the_gone(network, a, MANY)
    waiting = asyncio.create_task(a.directory.open_link("b"))
    await asyncio.sleep(0.001)
    (await b.directory.open_link("a")).send(7)
    link = await waiting
    assert now_s() < CONNECT_TURN_S
    await until(lambda: link.arrived == [7])
    await asyncio.gather(*dials, return_exceptions=True)
    await closed(a, b, *gone)


async def test_dial_waits_on_if_the_connection_of_the_peer_has_ended() -> None:
    network = Network(1)
    a, b, *gone = await hosts(network, "a", "b", *MANY)
    dials = await dial_the_gone(network, a, MANY[:WINDOW_FIRST])
    waiting = asyncio.create_task(a.directory.open_link("b"))
    await asyncio.sleep(0.001)
    a.entry("b").settled.set()  # as when a connection has ended
    await waiting
    assert now_s() >= CONNECT_TURN_S
    await asyncio.gather(*dials, return_exceptions=True)
    await closed(a, b, *gone)


async def test_time_of_a_dial_counts_from_its_turn() -> None:
    network = Network(1)
    names = [f"far{number}" for number in range(100)]
    a, *others = await hosts(network, "a", *names)
    for name in names:
        network.between("a", name).delay(0.1)
    await asyncio.gather(*(a.directory.open_link(name) for name in names))
    assert now_s() > TIMES.connect_timeout_s  # in turns; none took so long
    await closed(a, *others)
