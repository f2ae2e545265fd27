"""Which regions are kept, and what is known of them at peers.

That no message refers to a region that is not there, whatever the order of events, says
tests/property/machines.
"""

from __future__ import annotations

import pytest

from asyncrpc.core.payloads.machine import regions
from asyncrpc.core.payloads.machine.regions import KeptRegions, RegionState
from asyncrpc.errors import RejectedError

ONE, TWO = b"one", b"two"
UNSHARED, SHARED, DOUBTED = RegionState


def kept_of(
    *keys: bytes, users: frozenset[bytes] = frozenset()
) -> KeptRegions[str, bytes]:
    kept: KeptRegions[str, bytes] = KeptRegions(has_users=lambda key: key in users)
    for key in keys:
        kept.keep(key, key)
    return kept


class TestKeeping:
    def test_region_over_the_limit_changes_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(regions, "REGIONS_MAX", 1)
        kept = kept_of(ONE)
        kept.keep(ONE, ONE)
        with pytest.raises(RejectedError, match="at most 1 shared storages"):
            kept.keep(TWO, TWO)
        assert list(kept.regions) == [ONE]
        assert kept.used == {ONE}

    def test_regions_of_peer_have_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(regions, "PEER_REGIONS_MAX", 1)
        kept = kept_of(ONE, TWO)
        kept.check_part("b")
        kept.on_asked("b", ONE)
        with pytest.raises(RejectedError, match="one peer can share at most 1"):
            kept.check_part("b")
        kept.check_part("c")
        kept.on_gone("b", [ONE])
        kept.check_part("b")

    def test_invented_keys_of_peers_are_not_kept(self) -> None:
        kept = kept_of(ONE)
        assert kept.find(TWO) is None
        assert kept.used == {ONE}

    def test_region_unused_between_two_sweeps_is_idle(self) -> None:
        kept = kept_of(ONE, TWO)
        assert kept.sweep() == []
        kept.find(TWO)
        assert kept.sweep() == [ONE]

    def test_region_with_users_is_not_idle(self) -> None:
        kept = kept_of(ONE, TWO, users=frozenset({ONE}))
        kept.sweep()
        assert kept.sweep() == [TWO]

    def test_sweep_ends_before_the_next_one_begins(self) -> None:
        kept = kept_of(ONE)
        kept.sweep()
        assert kept.sweep() == [ONE]
        assert kept.sweep() == []
        kept.keep(ONE, ONE)
        kept.let_go([ONE])
        assert len(kept) == 1
        kept.sweep()
        assert kept.sweep() == [ONE]
        kept.let_go([ONE])
        assert len(kept) == 0


class TestPeers:
    def test_peer_is_asked_for_regions_it_may_lack(self) -> None:
        kept = kept_of(ONE, TWO)
        question = kept.begin("b", kept.missing("b", [ONE, TWO]))
        assert question.ask() == [ONE, TWO]
        assert kept.confirm(question, TWO)
        assert question.ask() == [ONE]
        assert kept.missing("b", [ONE, TWO]) == [ONE]
        assert kept.missing("c", [ONE, TWO]) == [ONE, TWO]

    def test_answer_before_a_gone_confirms_nothing(self) -> None:
        kept = kept_of(ONE)
        question = kept.begin("b", [ONE])
        question.ask()
        kept.on_gone("b", [ONE])
        assert not kept.confirm(question, ONE)
        assert kept.state("b", ONE) is UNSHARED
        assert question.ask() == [ONE]
        assert kept.confirm(question, ONE)
        kept.end(question)
        assert kept.state("b", ONE) is SHARED

    def test_gone_of_another_region_or_peer_is_ignored(self) -> None:
        kept = kept_of(ONE, TWO)
        question = kept.begin("b", [ONE])
        question.ask()
        kept.on_gone("b", [TWO])
        kept.on_gone("c", [ONE])
        assert kept.confirm(question, ONE)

    def test_peer_being_told_of_an_end_is_asked_before_the_next_use(self) -> None:
        kept = kept_of(ONE)
        kept.on_asked("b", ONE)
        assert kept.missing("b", [ONE]) == []
        kept.sweep()
        assert kept.tell("b", kept.sweep()) == [ONE]
        assert kept.missing("b", [ONE]) == [ONE]

    def test_peer_without_the_region_is_not_told(self) -> None:
        kept = kept_of(ONE, TWO)
        kept.on_asked("b", ONE)
        kept.sweep()
        idle = kept.sweep()
        assert kept.tell("c", idle) == []
        assert kept.tell("b", idle) == [ONE]

    def test_silent_peer_is_told_again_and_awaited(self) -> None:
        kept = kept_of(ONE)
        kept.on_asked("b", ONE)
        kept.sweep()
        for _ in range(2):
            assert kept.tell("b", kept.sweep()) == [ONE]
            kept.let_go([ONE])
            assert len(kept) == 1
        kept.on_told("b", kept.tell("b", kept.sweep()))
        kept.let_go([ONE])
        assert len(kept) == 0

    def test_region_awaited_by_a_message_is_kept(self) -> None:
        kept = kept_of(ONE)
        first, second = kept.begin("b", [ONE]), kept.begin("b", [ONE])
        kept.end(first)
        kept.sweep()
        assert kept.sweep() == []
        kept.end(second)
        assert kept.sweep() == [ONE]

    def test_unanswered_question_may_have_been_heard(self) -> None:
        kept = kept_of(ONE)
        kept.end(kept.begin("b", [ONE]))
        assert kept.state("b", ONE) is DOUBTED

    def test_lost_peer_counts_on_no_region_and_its_answers_are_ignored(self) -> None:
        kept = kept_of(ONE, TWO)
        kept.on_asked("b", TWO)
        question = kept.begin("b", [ONE])
        kept.on_lost("b")
        assert not kept.confirm(question, ONE)
        kept.end(question)
        assert list(kept) == []
        kept.sweep()
        idle = kept.sweep()
        assert idle == [ONE, TWO]
        kept.on_told("b", idle)
        assert list(kept) == []

    def test_cleared_table_knows_nothing(self) -> None:
        kept = kept_of(ONE)
        question = kept.begin("b", [ONE])
        kept.clear()
        kept.end(question)
        assert len(kept) == 0
        assert list(kept) == []
