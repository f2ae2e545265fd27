"""Calls that were lost: each because of a fault between its own workers, or of none.

Wrong calls and right ones alike: what is wrong with one call must lose no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

from asyncrpc import Outcome
from tests.chaos.history import History
from tests.chaos.log import Call, End, Loss, Story

KILLED: Final = "a worker was killed"
PARTED: Final = "they could not hear each other for too long"
STOPPED: Final = "it was stopped, and silent before for want of a processor"
UNREACHABLE: Final = "it was down or out of reach"
NONE: Final = ""
WATCH_SAID: Final = "its process is stopped"
RESTARTED: Final = "it has been restarted"
EVIDENCE_S: Final = 4.0  # no older is what a worker knows of a peer's process
# A call with so much time that waited for all of it, undisturbed, was lost silently.
PATIENT_S: Final = 30.0


@dataclass(slots=True)
class Losses:
    # How many calls each kind of fault has cost.
    causes: Counter[str] = field(default_factory=Counter)
    # Calls that no fault explains, by caller and callee, kind and error.
    innocent: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    # Those calls, and links that were given up without a cause.
    lines: list[str] = field(default_factory=list)


def judge_losses(story: Story, history: History) -> Losses:
    """Find the cause of every lost call, and of every link that was given up."""
    report = Losses()
    for loss in story.losses:
        if loss.at_s < history.left_s and not cause_of_loss(loss, story, history):
            report.lines.append(f"{_said(loss)}, which no fault explains")
    for call_id, call in story.calls.items():
        if call.end is End.LATE and _waited_in_vain(call, history):
            _add(report, call_id, call, "it waited for all of its time, undisturbed")
        elif call.end is End.LOST:
            cause, losses = cause_of(call, story, history)
            if cause:
                report.causes[cause] += 1
            else:
                said = "; ".join(map(_said, losses)) or "no link was given up"
                _add(report, call_id, call, said)
    return report


def cause_of(call: Call, story: Story, history: History) -> tuple[str, list[Loss]]:
    """Return why a call was lost, or nothing, and the links that were given up."""
    workers = {_name(call.caller), *call.parties}
    losses = [
        loss
        for loss in story.losses
        if call.since_s <= loss.at_s <= call.ended_s
        and {_name(loss.by), loss.peer} <= workers
    ]
    for loss in losses:
        if cause := cause_of_loss(loss, story, history):
            return cause, losses
    for loss in _believed_losses(call, story):
        if cause := cause_of_loss(loss, story, history):
            return cause, losses
    # No link was lost, so there was none.  If the function may have run there was.
    if not losses and call.outcome is not Outcome.EXECUTED:
        for worker, other in _pairs(call):
            if history.unreachable(worker, other, call.since_s, call.ended_s):
                return UNREACHABLE, losses
    return NONE, losses


def _believed_losses(call: Call, story: Story) -> Iterator[Loss]:
    """Yield the losses of parties that had not heard by then that the peer is back.

    A group that is made meanwhile fails by what one of its members still believes.
    """
    workers = {_name(call.caller), *call.parties}
    heard = {
        (loss.by, loss.life)
        for loss in story.losses
        if loss.reason == RESTARTED and loss.at_s >= call.since_s
    }
    for loss in story.losses:
        is_old = loss.at_s < call.since_s and (loss.by, loss.life) in heard
        if is_old and {_name(loss.by), loss.peer} <= workers:
            yield loss


def cause_of_loss(loss: Loss, story: Story, history: History) -> str:
    """Return why a worker has given up another; empty if no fault explains it."""
    if history.killed(story.lives.get(loss.life, ""), loss.at_s):
        return KILLED
    if history.parted(_name(loss.by), loss.peer, loss.linked_s, loss.at_s):
        return PARTED
    # On a machine with too much to do one is silent before it is stopped.  The sidecar
    # says that it is stopped, and so it was when the sidecar looked.
    looked_s = loss.at_s - EVIDENCE_S
    if WATCH_SAID in loss.reason and history.stopped(loss.peer, looked_s, loss.at_s):
        return STOPPED
    return NONE


def _waited_in_vain(call: Call, history: History) -> bool:
    is_patient = call.limit_s >= PATIENT_S and call.took_s >= call.limit_s
    return is_patient and not any(
        history.disturbed(worker, other, call.since_s, call.ended_s)
        for worker, other in _pairs(call)
    )


def _pairs(call: Call) -> Iterator[tuple[str, str]]:
    yield from combinations(sorted({_name(call.caller), *call.parties}), 2)


def _add(report: Losses, call_id: str, call: Call, why: str) -> None:
    pair = f"{_name(call.caller)} -> {', '.join(call.parties)}"
    report.innocent[pair, call.what, call.error] += 1
    report.lines.append(
        f"{call_id} ({call.what}; {call.error}) {pair}, "
        f"{call.begun_s:.2f} to {call.ended_s:.2f} s: {call.text!r}; {why}"
    )


def _said(loss: Loss) -> str:
    return f"{loss.by} gave up {loss.peer!r} at {loss.at_s:.2f} s ({loss.reason})"


def _name(label: str) -> str:
    return label.partition(".")[0]
