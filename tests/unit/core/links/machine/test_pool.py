"""Two workers that dial each other end up with one connection, and the same one.

Every order of events is visited: what is wanted, delivered, refused, given up and, in
the second half, broken.  `dial_world` plays the workers and the network.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncrpc.core.links.machine.pool import PeerConnection, PeerState
from tests.unit.core.links.machine.dial_world import World

BOTH = {"smaller": 1, "larger": 1}
WORLDS_MAX = 20_000  # there are 7,917 in the largest of these tests


def ends_of(first: World) -> Iterator[World]:
    """Visit every world that can come of this one; return those where all is quiet.

    They come as they are found, so that a wrong one is told before all are visited:
    with a mistake in the machine there may be very many.
    """
    seen = {first.key()}
    open_worlds, ends = [first], 0
    while open_worlds:
        world = open_worlds.pop()
        successors = list(world.successors())
        if not successors:
            ends += 1
            yield world
        for successor in successors:
            if (key := successor.key()) not in seen:
                seen.add(key)
                open_worlds.append(successor)
        assert len(seen) <= WORLDS_MAX
    assert ends > 1


def connections_of(world: World) -> set[str | None]:
    return {side.machine.connection for side in world.sides.values()}


class TestWithoutLosses:
    @pytest.mark.parametrize("attempts_max", [1, 2, 4])
    @pytest.mark.parametrize("wants", [BOTH, {"smaller": 2, "larger": 3}])
    def test_both_sides_hold_the_same_single_connection(
        self, wants: dict[str, int], attempts_max: int
    ) -> None:
        for end in ends_of(World.new(wants, attempts_max, losses=0)):
            assert connections_of(end) == {end.agreed}
            assert end.agreed
            assert {side.link for side in end.sides.values()} == {end.agreed}
            assert not any(side.awaits_proof for side in end.sides.values())

    @pytest.mark.parametrize("attempts_max", [2, 4])
    def test_connection_a_side_may_have_used_is_never_given_up(
        self, attempts_max: int
    ) -> None:
        """Calls may be under way on it, and would fail."""
        wants = {"smaller": 2, "larger": 2}
        for end in ends_of(World.new(wants, attempts_max, losses=0)):
            assert end.offences == ()

    @pytest.mark.parametrize("name", ["smaller", "larger"])
    def test_uncrossed_dial_gets_its_connection(self, name: str) -> None:
        world = World.new({**dict.fromkeys(BOTH, 0), name: 1}, 1, losses=0)
        while successors := list(world.successors()):
            (world,) = successors
        assert connections_of(world) == {f"{name} 1"}

    def test_crossed_first_dials_keep_the_offer_of_the_smaller_id(self) -> None:
        """Either may survive if it comes first; if both are under way, one does."""
        smaller, larger = PeerConnection[str](1), PeerConnection[str](2)
        assert smaller.want()
        assert larger.want()
        assert not smaller.on_offer(2, 0).accept
        assert larger.on_offer(1, 0).accept


class TestWithALoss:
    """A connection may break at any moment; its ends learn of it at different times."""

    @pytest.mark.parametrize(
        ("wants", "attempts_max"),
        [(BOTH, 3), ({"smaller": 2, "larger": 1}, 2), ({"smaller": 1, "larger": 2}, 2)],
    )
    def test_both_sides_agree_after_a_loss(
        self, wants: dict[str, int], attempts_max: int
    ) -> None:
        for end in ends_of(World.new(wants, attempts_max, losses=1)):
            assert len(connections_of(end)) == 1
            assert len({side.link for side in end.sides.values()}) == 1
            assert not any(side.awaits_proof for side in end.sides.values())

    @pytest.mark.parametrize("dialed_again", ["smaller", "larger"])
    def test_repeated_offer_replaces_a_lost_connection(self, dialed_again: str) -> None:
        """Even if the peer believes in the old one: a second offer is taken."""
        dialer_id, other = (1, 2) if dialed_again == "smaller" else (2, 1)
        for attempt_of_the_old in (0, 1):
            believer = PeerConnection[str](other)
            assert believer.want(attempt_of_the_old)
            believer.on_open("old", dialed=True)
            verdicts = [believer.on_offer(dialer_id, attempt) for attempt in (0, 1)]
            assert verdicts[-1].accept
            assert verdicts[-1].replaced == "old"


class TestOneSide:
    def test_dial_is_started_once(self) -> None:
        machine = PeerConnection[str](1)
        assert machine.want()
        assert not machine.want()
        machine.on_open("one", dialed=True)
        assert not machine.want()
        assert machine.connection == "one"

    def test_failed_dial_may_be_repeated(self) -> None:
        machine = PeerConnection[str](1)
        machine.want()
        machine.on_dial_failed()
        assert machine.want()

    def test_failed_dial_leaves_an_accepted_connection_alone(self) -> None:
        machine = PeerConnection[str](2)
        machine.want()
        machine.on_open("theirs", dialed=False)
        machine.on_dial_failed()
        assert machine.state is PeerState.TAKEN
        assert machine.connection == "theirs"

    def test_accepted_connection_is_open_after_the_first_message(self) -> None:
        machine = PeerConnection[str](2)
        machine.on_open("theirs", dialed=False)
        assert not machine.want()
        assert not machine.on_proven("another")
        assert machine.on_proven("theirs")
        assert machine.state is PeerState.OPEN
        assert not machine.on_proven("theirs")

    def test_loss_of_another_connection_is_ignored(self) -> None:
        machine = PeerConnection[str](1)
        machine.on_open("one", dialed=False)
        assert not machine.on_lost("other")
        assert machine.connection == "one"
        assert machine.on_lost("one")
        assert machine.connection is None
        assert machine.state is PeerState.IDLE

    def test_crossed_offer_is_refused_once_per_connection(self) -> None:
        machine = PeerConnection[str](1)
        for connection in ("one", "two"):
            machine.want()
            machine.on_open(connection, dialed=True)
            assert not machine.on_offer(2, 0).accept
            assert machine.on_offer(2, 0).accept
            machine.on_lost(connection)

    def test_both_ends_keep_the_same_of_two_accepted_connections(self) -> None:
        """The one that the smaller dialed: its own here, the accepted one there."""
        smaller, larger = PeerConnection[str](1), PeerConnection[str](2)
        for machine in (smaller, larger):
            machine.want()
            machine.on_open("the peer's", dialed=False)
        assert smaller.on_answer(2).accept
        assert smaller.on_answer(2).replaced == "the peer's"
        assert not larger.on_answer(1).accept

    def test_repeated_dial_wins_against_a_first_one(self) -> None:
        """The first one may be lost on a way that only the peer can go."""
        machine = PeerConnection[str](1)
        machine.want()
        assert not machine.on_offer(2, 0).accept
        assert machine.on_offer(2, 1).accept

    def test_peer_that_dials_again_replaces_its_connection(self) -> None:
        machine = PeerConnection[str](1)
        machine.on_open("theirs", dialed=False)
        verdict = machine.on_offer(2, 0)
        assert verdict.accept
        assert verdict.replaced == "theirs"
