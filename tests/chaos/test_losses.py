"""The verdict on lost calls: what a fault explains, and what none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrpc import Outcome, OwnerLostError, RejectedError, WorkerLostError
from asyncrpc.errors import DecodeError, EncodeError
from tests.chaos.history import History
from tests.chaos.load import Wanted, end_of
from tests.chaos.log import Call, End, Loss, Story, read_all
from tests.chaos.losses import (
    KILLED,
    PARTED,
    RESTARTED,
    UNREACHABLE,
    Losses,
    judge_losses,
)
from tests.chaos.mistakes_made import count_mistakes

LIFE = "b.20"  # that `a` called
SILENCE_S, DIAL_S = 4.0, 10.0


def lost_call(
    *,
    since_s: float = 100.0,
    ended_s: float = 101.0,
    outcome: Outcome = Outcome.UNKNOWN,
    end: End = End.LOST,
    limit_s: float = 30.0,
    parties: tuple[str, ...] = ("b",),
) -> Call:
    return Call(
        what="mistake no function",
        limit_s=limit_s,
        outcome=outcome,
        took_s=ended_s - since_s,
        error="WorkerLostError",
        caller="a.10",
        parties=parties,
        since_s=since_s,
        begun_s=since_s,
        ended_s=ended_s,
        end=end,
    )


def given_up(by: str = "a.10", *, at_s: float = 100.5, linked_s: float = 0.0) -> Loss:
    peer = "b" if by.startswith("a") else "a"
    return Loss(by, peer, "life of b", linked_s, at_s, "it is gone")


def judged(call: Call, history: History, *losses: Loss) -> Losses:
    return judge_losses(
        Story({"a.10.1": call}, list(losses), {"life of b": LIFE}), history
    )


def history(*faults: tuple[str, tuple[str, ...], float, float, str]) -> History:
    record = History(silence_s=SILENCE_S, dial_s=DIAL_S)
    for kind, names, begun_s, ended_s, life in faults:
        record.begin(kind, *names, at_s=begun_s, life=life)(ended_s)
    return record


KILL = ("SIGKILL", ("b",), 100.2, 108.0, LIFE)
NO_OUTCOME = Outcome.NOT_EXECUTED


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (KILL, KILLED),
        (("SIGKILL", ("b",), 100.2, 108.0, "b.19"), ""),  # another life
        (("SIGKILL", ("b",), 100.8, 108.0, LIFE), ""),  # later
        (("SIGKILL", ("c",), 100.2, 108.0, "c.3"), ""),  # another worker
        (("SIGSTOP, long", ("b",), 92.0, 100.4, ""), PARTED),
        (("SIGSTOP, long", ("a",), 92.0, 100.4, ""), PARTED),
        (("SIGSTOP, long", ("c",), 92.0, 100.4, ""), ""),
        (("SIGSTOP, short", ("b",), 97.4, 100.4, ""), ""),  # too short to lose anybody
        (("partition, long", ("a", "b"), 92.0, 100.4, ""), PARTED),
        (("partition, long", ("b", "c"), 92.0, 100.4, ""), ""),  # another pair
        (("partition, short", ("a", "b"), 98.0, 100.4, ""), ""),
        (("partition, long", ("b",), 92.0, 100.4, ""), PARTED),  # of one and all
        (("cut", ("a", "b"), 100.4, 100.4, ""), ""),  # is resumed, and loses nothing
        (("delay", ("a",), 92.0, 110.0, ""), ""),
    ],
)
def test_lost_link_explains_its_calls(
    fault: tuple[str, tuple[str, ...], float, float, str], cause: str
) -> None:
    verdict = judged(lost_call(), history(fault), given_up())
    assert dict(verdict.causes) == ({cause: 1} if cause else {})
    assert verdict.innocent.total() == (0 if cause else 1)
    assert len(verdict.lines) == (0 if cause else 2)  # the link, and the call


@pytest.mark.parametrize(
    ("names", "reason", "is_explained"),
    [
        (("b",), "silent for 6.0 s: its process is stopped, by a signal", True),
        (("c",), "silent for 6.0 s: its process is stopped, by a signal", False),
        (("b",), "silent for 6.0 s: its event loop runs", False),
    ],
)
def test_stop_of_the_silent_worker_explains_the_loss(
    names: tuple[str, ...], reason: str, *, is_explained: bool
) -> None:
    stop = ("SIGSTOP, short", names, 98.0, 100.4, "")
    loss = Loss("a.10", "b", "life of b", 0.0, 100.5, reason)
    assert bool(judged(lost_call(), history(stop), loss).lines) != is_explained


def test_fault_does_not_explain_a_younger_link() -> None:
    stop = ("SIGSTOP, long", ("b",), 80.0, 95.0, "")
    old = judged(lost_call(), history(stop), given_up(linked_s=94.0))
    assert not old.lines
    young = judged(lost_call(), history(stop), given_up(linked_s=95.1))
    assert len(young.lines) == 2


def test_consecutive_short_silences_count_as_one() -> None:
    faults = (
        ("partition, short", ("a", "b"), 95.0, 97.5, ""),
        ("SIGSTOP, short", ("b",), 98.0, 100.3, ""),
    )
    assert not judged(lost_call(), history(*faults), given_up()).lines
    apart = (*faults[:1], ("SIGSTOP, short", ("b",), 99.9, 100.3, ""))
    assert judged(lost_call(), history(*apart), given_up()).lines


def test_callee_may_have_given_up_the_caller() -> None:
    faults = history(("partition, long", ("a", "b"), 92.0, 100.4, ""))
    assert not judged(lost_call(), faults, given_up("b.20")).lines


@pytest.mark.parametrize(
    ("fault", "outcome", "is_explained"),
    [
        (("SIGKILL", ("b",), 95.0, 100.5, LIFE), NO_OUTCOME, True),
        (("SIGKILL", ("b",), 90.0, 95.0, LIFE), NO_OUTCOME, False),  # is back
        (("start", ("b",), 90.0, 100.5, ""), NO_OUTCOME, True),
        (("partition, long", ("a", "b"), 83.0, 92.0, ""), NO_OUTCOME, True),
        (("partition, long", ("a", "b"), 73.0, 82.0, ""), NO_OUTCOME, False),
        (("partition, long", ("a", "c"), 83.0, 101.0, ""), NO_OUTCOME, False),
        (("cut", ("a", "c"), 100.4, 100.4, ""), NO_OUTCOME, False),
        # Who may have been reached had a link.
        (("SIGKILL", ("b",), 95.0, 100.5, LIFE), Outcome.EXECUTED, False),
    ],
)
def test_fault_explains_a_call_without_a_link(
    fault: tuple[str, tuple[str, ...], float, float, str],
    outcome: Outcome,
    *,
    is_explained: bool,
) -> None:
    verdict = judged(lost_call(outcome=outcome), history(fault))
    assert dict(verdict.causes) == ({UNREACHABLE: 1} if is_explained else {})
    assert dict(verdict.innocent) == (
        {}
        if is_explained
        else {("a -> b", "mistake no function", "WorkerLostError"): 1}
    )


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        (lost_call(end=End.LATE, ended_s=130.1), True),
        (lost_call(end=End.LATE, ended_s=130.1, parties=("c",)), False),  # disturbed
        (lost_call(end=End.LATE, ended_s=100.4), False),  # it did not wait for it
        (lost_call(end=End.LATE, ended_s=102.1, limit_s=2.0), False),  # impatient
        (lost_call(end=End.AS_EXPECTED), False),
        (lost_call(end=End.STRANGE), False),  # is a finding of its own
    ],
)
def test_unanswered_call_is_found(call: Call, *, is_found: bool) -> None:
    faults = history(("cut", ("a", "c"), 105.0, 105.0, ""))
    assert bool(judged(call, faults).lines) == is_found


@pytest.mark.parametrize(
    ("outcome", "losses"),
    [
        (NO_OUTCOME, []),  # a dial is repeated
        (Outcome.UNKNOWN, []),  # a link is resumed
        (NO_OUTCOME, [given_up()]),
    ],
)
def test_cut_explains_no_loss(outcome: Outcome, losses: list[Loss]) -> None:
    cut = ("cut", ("a", "b"), 100.4, 100.4, "")
    verdict = judged(lost_call(outcome=outcome), history(cut), *losses)
    assert not verdict.causes
    assert verdict.lines


def test_links_that_end_with_their_workers_are_not_losses() -> None:
    faults = history()
    faults.left_s = 100.4
    assert not judged(lost_call(end=End.AS_EXPECTED), faults, given_up()).lines


WANTED = Wanted((DecodeError,), ("cannot import",), Outcome.NOT_EXECUTED)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (DecodeError("cannot import x", outcome=Outcome.NOT_EXECUTED), End.AS_EXPECTED),
        (DecodeError("cannot import x", outcome=Outcome.EXECUTED), End.STRANGE),
        (DecodeError("no text", outcome=Outcome.NOT_EXECUTED), End.STRANGE),
        (RejectedError("cannot import x", outcome=Outcome.NOT_EXECUTED), End.STRANGE),
        (WorkerLostError("the worker is gone"), End.LOST),
        (TimeoutError(), End.LATE),
        (ValueError("something else"), End.STRANGE),
    ],
)
def test_error_of_a_mistake_is_classified(error: BaseException, end: End) -> None:
    assert end_of(error, WANTED) is end


def test_reference_to_a_lost_owner_counts_as_a_loss() -> None:
    error = EncodeError("cannot be sent: args[1]: the owner is gone")
    assert end_of(error, None) is End.STRANGE
    error.__cause__ = OwnerLostError(worker="b", incarnation=1, reason="it was killed")
    assert end_of(error, None) is End.LOST


LOG = """\
I 00000000000000aa
M a.10.1 100.0000 99.5000 2.0 b,c mistake no function
C a.10.1 UNKNOWN 100.6000 0.50 LOST WorkerLostError the worker is gone
M a.10.2 100.1000 100.1000 2.0 c add
C a.10.2 EXECUTED 100.2000 0.10 AS_EXPECTED
M a.10.3 100.1000 100.1000 2.0 b mistake no function
X a.10.3
L b 00000000000000bb 100.5000 its process has ended
K b 00000000000000bb 103.0000
L b 00000000000000bb 104.0000
F relay a.10.1 returned 'b'
L c 00000000000000cc 10"""


def test_log_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.10.told").write_text(LOG, encoding="utf-8")
    (tmp_path / "b.20.ran").write_text("B a.10.2\n", encoding="utf-8")
    story = read_all(tmp_path, set())
    assert story.lives == {"00000000000000aa": "a.10"}
    first = story.calls["a.10.1"]
    assert (first.caller, first.parties, first.kind) == (
        "a.10",
        ("b", "c"),
        "no function",
    )
    assert (first.since_s, first.begun_s, first.ended_s) == (99.5, 100.0, 100.6)
    assert (first.end, first.error) == (End.LOST, "WorkerLostError")
    assert first.text == "the worker is gone"
    second = story.calls["a.10.2"]
    assert (second.kind, second.ran, second.error) == ("", ["b.20"], "")
    assert [loss.linked_s for loss in story.losses] == [0.0, 103.0]
    assert story.findings == ["a.10: relay a.10.1 returned 'b'"]
    mistakes = count_mistakes(story)
    assert mistakes.counts == {"no function": 2}
    assert mistakes.ends == {("no function", End.LOST): 1}
    assert (mistakes.workers, mistakes.at_once) == ({"a"}, 1)


@pytest.mark.parametrize(
    ("heard_s", "cause"), [(100.5, KILLED), (99.5, "")], ids=["not yet", "before"]
)
def test_member_unaware_of_a_restart_fails_a_group(heard_s: float, cause: str) -> None:
    killed = ("SIGKILL", ("b",), 98.0, 99.0, LIFE)
    lost = Loss("c.30", "b", "life of b", 0.0, 98.1, "its process has ended")
    back = Loss("c.30", "b", lost.life, 98.1, heard_s, RESTARTED)
    call = lost_call(parties=("b", "c"), since_s=100.0, ended_s=100.1)
    verdict = judged(call, history(killed), lost, back)
    assert verdict.causes[cause] == (cause == KILLED)
    assert bool(verdict.innocent) is (not cause)
