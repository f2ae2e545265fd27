"""A pass on one worker: nothing runs early, nothing twice, and it ends.

Orders of arrival are tried exhaustively for small passes, and cycles for all graphs of
three workers; larger ones are in tests/property/test_autograd_machine.py.
"""

from __future__ import annotations

from itertools import permutations, product

import pytest

from asyncrpc.autograd.machine import Mode, PassMachine, workers_in_cycles
from asyncrpc.errors import LocalProtocolError, RemoteProtocolError

Machine = PassMachine[str, str]


def machine_of(starts: str) -> Machine:
    machine = Machine()
    for start in starts:
        machine.add_start(start)
    return machine


def set_partitions(things: str) -> list[list[str]]:
    """Return every way in which things can come, one message after another."""
    found = []
    for order in permutations(things):
        for cuts in product([False, True], repeat=len(things) - 1):
            groups = [order[0]]
            for thing, cut in zip(order[1:], cuts, strict=True):
                if cut:
                    groups.append(thing)
                else:
                    groups[-1] += thing
            found.append(groups)
    return found


class TestWhole:
    @pytest.mark.parametrize("groups", set_partitions("xyz"), ids="-".join)
    def test_all_run_at_once_when_the_last_has_come(self, groups: list[str]) -> None:
        machine = machine_of("xyz")
        for group in groups[:-1]:
            assert machine.arrive(group, Mode.WHOLE) == []
            assert not machine.is_done
        batch = machine.arrive(groups[-1], Mode.WHOLE)
        assert batch == list("".join(groups))
        assert not machine.is_done
        assert machine.is_last(batch)
        assert machine.ran(batch) == []
        assert machine.is_done

    def test_what_is_waited_for_is_known(self) -> None:
        machine = machine_of("xyz")
        machine.arrive("y", Mode.WHOLE)
        assert set(machine.waits_for) == {"x", "z"}


# x reaches the leaf L, y both, z only M.
REACH = {"x": "L", "y": "LM", "z": "M"}


class TestPartial:
    @pytest.mark.parametrize("groups", set_partitions("xyz"), ids="-".join)
    @pytest.mark.parametrize("backwards", [False, True])
    def test_a_leaf_is_complete_once_when_all_that_reach_it_have_run(
        self, groups: list[str], *, backwards: bool
    ) -> None:
        machine = machine_of("xyz")
        machine.set_reach(REACH)
        batches = [machine.arrive(group, Mode.PARTIAL) for group in groups]
        assert batches == [list(group) for group in groups]
        finished: set[str] = set()
        complete: set[str] = set()
        for batch in reversed(batches) if backwards else batches:
            assert not machine.is_done
            finished |= set(batch)
            now = machine.ran(batch)
            expected = {
                leaf
                for leaf in "LM"
                if {start for start in REACH if leaf in REACH[start]} <= finished
            }
            assert sorted(now) == sorted(expected - complete)
            complete = expected
        assert complete == {"L", "M"}
        assert machine.is_done

    @pytest.mark.parametrize("groups", set_partitions("xyz"), ids="-".join)
    def test_a_batch_is_last_if_nothing_runs_beside_it_and_nothing_follows(
        self, groups: list[str]
    ) -> None:
        machine = machine_of("xyz")
        batches = []
        for group in groups:
            batches.append(machine.arrive(group, Mode.PARTIAL))
            is_whole = len(groups) == 1
            assert machine.is_last(batches[-1]) is is_whole
        while batches:
            assert machine.is_last(batches[0]) is (len(batches) == 1)
            machine.ran(batches.pop(0))

    def test_a_batch_beside_starts_that_wait_is_not_last(self) -> None:
        machine = machine_of("xy")
        assert not machine.is_last(machine.arrive("x", Mode.PARTIAL))

    def test_a_start_that_reaches_nothing_completes_nothing(self) -> None:
        machine = machine_of("xy")
        machine.set_reach({"x": (), "y": "L"})
        assert machine.ran(machine.arrive("x", Mode.PARTIAL)) == []
        assert machine.ran(machine.arrive("y", Mode.PARTIAL)) == ["L"]

    def test_a_leaf_that_a_start_reaches_in_two_ways_counts_once(self) -> None:
        machine = machine_of("x")
        machine.set_reach({"x": "LL"})
        assert machine.ran(machine.arrive("x", Mode.PARTIAL)) == ["L"]


class TestMistakes:
    def test_a_pass_without_starts_is_done(self) -> None:
        assert Machine().is_done

    @pytest.mark.parametrize("progress", ["waits", "ready", "runs", "has run"])
    def test_a_start_is_discovered_once_however_far_it_is(self, progress: str) -> None:
        machine = machine_of("xy")
        if progress == "ready":
            machine.arrive("x", Mode.WHOLE)
        elif progress != "waits":
            batch = machine.arrive("x", Mode.PARTIAL)
            if progress == "has run":
                machine.ran(batch)
        with pytest.raises(RemoteProtocolError, match="x was discovered twice"):
            machine.add_start("x")
        assert "y" in machine.waits_for

    @pytest.mark.parametrize("mode", Mode)
    def test_a_gradient_that_nobody_awaits_changes_nothing(self, mode: Mode) -> None:
        machine = machine_of("xy")
        with pytest.raises(RemoteProtocolError, match="a gradient for z, which"):
            machine.arrive(["x", "z"], mode)
        assert set(machine.waits_for) == {"x", "y"}
        assert machine.arrive("xy", mode) == ["x", "y"]

    @pytest.mark.parametrize("mode", Mode)
    def test_a_gradient_comes_once(self, mode: Mode) -> None:
        machine = machine_of("xy")
        machine.arrive("x", mode)
        with pytest.raises(RemoteProtocolError, match="a gradient for x, which"):
            machine.arrive("x", mode)

    def test_what_was_not_handed_out_cannot_have_run(self) -> None:
        machine = machine_of("xy")
        machine.arrive("x", Mode.PARTIAL)
        with pytest.raises(LocalProtocolError, match="more starts have run"):
            machine.ran("xy")
        assert machine.ran("x") == []


PAIRS = [(source, target) for source in "abc" for target in "abc"]


def test_workers_in_cycles_are_those_with_a_way_back_to_themselves() -> None:
    """Compared with Warshall's closure, for every graph of three workers."""
    for chosen in product([False, True], repeat=len(PAIRS)):
        edges = {pair for pair, is_in in zip(PAIRS, chosen, strict=True) if is_in}
        closure = set(edges)
        for middle, source, target in product("abc", repeat=3):
            if {(source, middle), (middle, target)} <= closure:
                closure.add((source, target))
        expected = {worker for worker in "abc" if (worker, worker) in closure}
        assert workers_in_cycles(edges) == expected, edges
