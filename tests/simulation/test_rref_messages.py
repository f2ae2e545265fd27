"""The RRef protocol over a network that loses, repeats, reorders, delays and parts.

Under the protocol lies what a link is asked to be: messages are numbered and kept until
they are acknowledged, and taken in order and once.  Whoever hears no acknowledgement
for as long as a lease declares the other lost.  The workers, their books and all that
must hold are those of the property test; every choice comes from the seed.

    $ python -m tests.simulation.test_rref_messages 7    # runs one seed
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import pytest

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.testing.loop import SimLoop
from tests.message_network import MessageNetwork
from tests.property.rref_world import Message, Node, World

SEEDS: Final = 200
WORKERS: Final = 4
STEPS: Final = 120
RREFS_MAX: Final = 4
CRASHES_MAX: Final = 3
RESEND_S: Final = 0.02
LEASE_S: Final = 1.0
LIMIT_S: Final = 300.0  # of virtual time

Way: TypeAlias = tuple[Incarnation, Incarnation]


class Numbered(NamedTuple):
    """A message on the network; what it says is in the world's books."""

    way: Way
    session: int
    number: int


class Acknowledged(NamedTuple):
    """All messages of a way before this number have been taken."""

    way: Way
    session: int
    number: int


@dataclass(slots=True)
class Channel:
    """One way of one session."""

    session: int
    sent: int = 0  # how many, ever
    taken: int = 0  # at the other end
    unacknowledged: deque[tuple[int, float]] = field(default_factory=deque)


class NetworkedWorld(World):
    """The world of the property test, whose messages travel by a network."""

    def __init__(self, network: MessageNetwork, rng: random.Random) -> None:
        self.network = network
        self.rng = rng
        self.channels: dict[Way, Channel] = {}
        self.sessions = 0
        self.names: dict[Incarnation, str] = {}
        self.spare = [f"w{number}" for number in range(WORKERS)]
        super().__init__(WORKERS)

    def start(self) -> Node:
        node = super().start()
        name = self.names[node.id] = self.spare.pop()
        self.network.register(name, lambda _sender, message: self.take(node, message))
        return node

    def crash(self, node: Node) -> None:
        self.network.crash(self.names[node.id])
        self.spare.append(self.names[node.id])  # it starts again under its name
        super().crash(node)

    def post(self, message: Message) -> None:
        super().post(message)
        way = (message.src, message.dst)
        channel = self.channels.get(way)
        if channel is None:
            self.sessions += 1
            channel = self.channels[way] = Channel(self.sessions)
        now_s = self.network.loop.time()
        channel.unacknowledged.append((channel.sent, now_s))
        self.transmit(way, Numbered(way, channel.session, channel.sent))
        if not channel.sent:
            self.network.loop.call_later(RESEND_S, self.resend, way, channel)
        channel.sent += 1

    def transmit(self, way: Way, message: Numbered | Acknowledged) -> None:
        src, dst = way if isinstance(message, Numbered) else way[::-1]
        self.network.send(self.names[src], self.names[dst], message)

    def resend(self, way: Way, channel: Channel) -> None:
        """Send again what is not acknowledged, or declare the other end lost."""
        if self.channels.get(way) is not channel or way[0] not in self.alive:
            return
        self.network.loop.call_later(RESEND_S, self.resend, way, channel)
        if not channel.unacknowledged or way[1] not in self.alive:
            return
        if self.network.loop.time() - channel.unacknowledged[0][1] > LEASE_S:
            self.cut(*way)
            return
        for number, _ in channel.unacknowledged:
            self.transmit(way, Numbered(way, channel.session, number))

    def take(self, node: Node, message: object) -> None:
        """Take what the network brings to a worker: perhaps late, perhaps again."""
        assert isinstance(message, Numbered | Acknowledged)
        channel = self.channels.get(message.way)
        if channel is None or channel.session != message.session:
            return
        if isinstance(message, Acknowledged):
            while channel.unacknowledged:
                if channel.unacknowledged[0][0] >= message.number:
                    return
                channel.unacknowledged.popleft()
            return
        if message.way[1] != node.id:
            return
        if message.number == channel.taken:
            channel.taken += 1
            self.deliver(message.way)
            self.check()
        if message.way in self.channels and message.way[0] in self.alive:
            acknowledged = Acknowledged(message.way, message.session, channel.taken)
            self.transmit(message.way, acknowledged)

    def cut(self, first: Incarnation, other: Incarnation) -> None:
        for way in ((first, other), (other, first)):
            self.channels.pop(way, None)
        super().cut(first, other)

    def lose(self, node: Node, lost: Incarnation) -> None:
        self.channels.pop((lost, node.id), None)
        super().lose(node, lost)


class Play:
    """What happens in one run."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.network = MessageNetwork(seed)
        self.world = NetworkedWorld(self.network, self.rng)
        self.crashes = 0
        self.failed: list[BaseException] = []  # while a message was taken
        names = [f"w{number}" for number in range(WORKERS)]
        self.links = [
            self.network.between(name, other)
            for name in names
            for other in names
            if name < other
        ]
        for link in self.links:
            link.delay(self.rng.choice([0.0005, 0.005, 0.02]))
            link.lose(self.rng.choice([0.0, 0.1, 0.4]))
            link.repeat(self.rng.choice([0.0, 0.3]))

    async def run(self) -> None:
        for _ in range(STEPS):
            self.step()
            self.check()
            await asyncio.sleep(self.rng.expovariate(1 / 0.02))
        for link in self.links:
            link.heal()
            link.lose(0.1)
        await self.settle()
        self.world.check_quiet()
        for node in self.world.alive.values():
            for rref_id in list(node.handles.elements()):
                self.world.drop(node, rref_id)
        await self.settle()
        self.world.check_empty()

    async def settle(self) -> None:
        """Let everything that is under way arrive, and every call end."""
        async with asyncio.timeout(LIMIT_S):
            while self.is_busy():
                self.go_on()
                self.check()
                await asyncio.sleep(RESEND_S)
            self.check()

    def check(self) -> None:
        if self.failed:
            raise self.failed[0]
        self.world.check()

    def on_failed(self, _loop: object, context: dict[str, Any]) -> None:
        """Keep what is raised where a message is taken, which the loop calls."""
        self.failed.append(context.get("exception") or AssertionError(context))

    def is_busy(self) -> bool:
        world = self.world
        nodes = world.alive.values()
        return bool(
            world.busy_links()
            or world.unnoticed
            or world.searches
            or any(node.decoding or node.calls for node in nodes)
        )

    def step(self) -> None:
        action = self.rng.choices(
            (self.remote, self.own, self.share, self.drop, self.go_on, self.fault),
            (2, 1, 6, 4, 8, 1),
        )[0]
        action()

    def a_node(self) -> Node:
        return self.world.alive[self.rng.choice(sorted(self.world.alive))]

    def a_peer(self, node: Node) -> Incarnation:
        return self.rng.choice(sorted(self.world.alive.keys() - {node.id}))

    def a_handle(self) -> tuple[Node, RRefId] | None:
        handles = [
            (node, rref_id)
            for node in self.world.alive.values()
            for rref_id in sorted(+node.handles)
        ]
        return self.rng.choice(handles) if handles else None

    def has_room(self) -> bool:
        nodes = self.world.alive.values()
        return len({handle for node in nodes for handle in node.handles}) < RREFS_MAX

    def remote(self) -> None:
        if self.has_room():
            node = self.a_node()
            self.world.remote(
                node,
                self.a_peer(node),
                is_large=self.rng.random() < 0.5,
                is_refused=self.rng.random() < 0.1,
            )

    def own(self) -> None:
        if self.has_room():
            self.world.own(self.a_node())

    def share(self) -> None:
        held = self.a_handle()
        if held is None:
            return
        node, rref_id = held
        to = self.a_peer(node)
        is_here = self.world.owner_of[rref_id] == node.id
        is_gone = is_here and node.owned.state(rref_id).name == "GONE"
        if to in node.noticed or rref_id in node.lost or is_gone:
            return
        is_large, is_result = self.rng.random() < 0.3, self.rng.random() < 0.3
        self.world.share(node, to, rref_id, is_large=is_large, is_result=is_result)

    def drop(self) -> None:
        held = self.a_handle()
        if held is not None:
            self.world.drop(*held)

    def go_on(self) -> None:
        """Let every worker do a part of what it has to do."""
        world, rng = self.world, self.rng
        if world.unnoticed:
            world.notice(rng.randrange(len(world.unnoticed)))
        if world.searches:
            world.find(rng.randrange(len(world.searches)))
        if world.parted() and rng.random() < 0.3:
            first, other = rng.choice(world.parted())
            world.meet_again(first, other)
        for node in list(world.alive.values()):
            if node.decoding:
                bodies = len(node.decoding)
                world.decode(node, node.decoding.pop(rng.randrange(bodies)))
            elif node.calls:
                rref_id = node.calls[0][0]
                if node.handles[rref_id] and rng.random() < 0.5:
                    world.drop(node, rref_id)
                world.end_call(node, 0)

    def fault(self) -> None:
        """Part two workers, for less or more than a lease, or restart one."""
        if self.crashes < CRASHES_MAX and self.rng.random() < 0.3:
            self.crashes += 1
            self.world.crash(self.a_node())
            self.world.start()
            return
        link = self.rng.choice(self.links)
        link.partition()
        lasts_s = self.rng.choice([0.3, 0.8, 3.0]) * LEASE_S
        self.network.loop.call_later(lasts_s, link.heal)


def play(seed: int) -> Play:
    """Run one seed; return what is left of it."""

    async def main() -> Play:
        playing = Play(seed)
        playing.network.loop.set_exception_handler(playing.on_failed)
        try:
            await playing.run()
        except BaseException as error:
            error.add_note(
                f"python -m tests.simulation.test_rref_messages {seed}    # again\n"
                + "\n".join(
                    f"{at_s:.4f} {event}"
                    for at_s, event in list(playing.network.trace)[-20:]
                )
            )
            raise
        return playing

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main())


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_protocol_holds_on_a_hostile_network(first: int) -> None:
    for seed in range(first, first + 20):
        play(seed)


def test_network_was_hostile() -> None:
    """What the seeds are to try does happen in them."""
    met: set[str] = set()
    for seed in range(20):
        playing = play(seed)
        events = [event for _, event in playing.network.trace]
        met |= {"loss" for event in events if "lost" in event}
        met |= {"crash"} if playing.crashes else set()
        met |= {"cut"} if playing.world.cuts else set()
        met |= {"freed"} if playing.world.freed else set()
    assert met == {"loss", "crash", "cut", "freed"}


def test_same_seed_gives_the_same_run() -> None:
    assert list(play(3).network.trace) == list(play(3).network.trace)


if __name__ == "__main__":
    play(int(sys.argv[1]))
