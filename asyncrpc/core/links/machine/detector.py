"""Is a silent peer dead?  The machine that suspects, has it confirmed, and judges.

A network cannot tell a process that is busy (one call of C code may hold the
interpreter for minutes, and then nothing is answered) from one that is stopped, or out
of reach.  So silence alone makes a peer *suspect*; then its host or its sidecar is
asked for *evidence*, again at every heartbeat; and only that and time can make it
*lost*.

    evidence       it is lost
    GONE           at once
    BUSY           never: what counts against it begins anew
    STOPPED        once it has been silent for `lost_after_s`
    TICKING        likewise: its loop runs, so it is the network that is broken
    UNREACHABLE,   likewise: nothing could be confirmed
    UNKNOWN

What counts as silence:

*   time since anything was received; after the connection broke, time since then;
*   but no time in which this worker itself stood still, which is seen from ticks that
    come late; evidence from before that is not used either;
*   nothing from before the last evidence that the peer was busy.

So, as long as this worker runs, a peer that can do nothing any more is lost at most
`lost_after_s + heartbeat_s` after it fell silent, and a busy one is not.

Time comes in from outside, in seconds.  Everything is a plain method: a receipt is one
assignment.

Source: suspicion and its confirmation by others, as in SWIM (Das, Gupta, Motivala:
"SWIM: Scalable Weakly-consistent Infection-style Process Group Membership Protocol",
DSN 2002); the wish not to blame a peer for one's own slowness, as in Lifeguard (Dadgar,
Phillips, Currey, 2017).
"""

from __future__ import annotations

import enum
from typing import Final

from asyncrpc.core.sidecar.pulse import FRESH_S

# Ticks in a heartbeat: at best silence is seen this much of it late.
TICKS: Final = 4


class Evidence(enum.Enum):
    """What is known of the process of a silent peer."""

    GONE = "its process has ended"
    STOPPED = "its process is stopped, by a signal or a debugger"
    BUSY = "its process can run but does not turn to its event loop"
    TICKING = "its event loop runs"
    UNREACHABLE = "its host does not answer"
    UNKNOWN = "nothing is known of its process"


class SilenceAction(enum.Enum):
    """What to do after a tick."""

    NONE = "nothing"
    SEND_PING = "ask the peer for a sign of life"
    ASK_EVIDENCE = "ask what became of its process, and tell `on_evidence`"
    LOST = "give the peer up, because of `reason`"


class Verdict(enum.Enum):
    """The judgement of a peer."""

    ALIVE = "the peer has been heard"
    SUSPECT = "the peer is silent"
    LOST = "the peer is given up"


class Detector:
    """Judges one peer by its silence, over one connection after another.

    Attributes:
        verdict: the present one.
        reason: once it is lost, why, for people; empty before.
        tick_s: how often to call `on_tick`.
        is_broken: whether there is no connection.
    """

    __slots__ = (
        "_asked_s",
        "_asks_after_s",
        "_awaits_evidence",
        "_counted_s",
        "_evidence",
        "_has_pinged",
        "_heard_s",
        "_heartbeat_s",
        "_lost_after_s",
        "_ticked_s",
        "is_broken",
        "reason",
        "tick_s",
        "verdict",
    )

    def __init__(
        self, now_s: float, *, heartbeat_s: float, lost_after_s: float
    ) -> None:
        """Begin with a peer that has just been heard.

        Args:
            heartbeat_s: silence after which the peer is pinged; after as much again it
                is suspected.
            lost_after_s: silence after which the peer may be lost; at least twice as
                long.
        """
        assert lost_after_s >= 2 * heartbeat_s > 0
        self._heartbeat_s = heartbeat_s
        self._lost_after_s = lost_after_s
        self._asks_after_s = min(2 * heartbeat_s, lost_after_s - heartbeat_s)
        self.tick_s = heartbeat_s / TICKS
        self.verdict = Verdict.ALIVE
        self.reason = ""
        self.is_broken = False
        self._ticked_s = now_s
        self._heard(now_s)

    def _heard(self, now_s: float) -> None:
        self._heard_s = now_s  # when silence began
        self._counted_s = now_s  # when that which counts against the peer began
        self._has_pinged = False
        self._asked_s: float | None = None  # when evidence was last asked for
        self._awaits_evidence = False
        self._evidence: Evidence | None = None

    # --- events ----------------------------------------------------------------------

    def on_receipt(self, now_s: float) -> None:
        """Something of the peer has arrived, whatever it is: it is alive."""
        if self.verdict is Verdict.LOST or self.is_broken:
            return
        self.verdict = Verdict.ALIVE
        self._heard(now_s)

    def on_break(self, now_s: float) -> SilenceAction:
        """The connection has ended without a word; another may take its place."""
        if self.verdict is Verdict.LOST or self.is_broken:
            return SilenceAction.NONE
        self.is_broken = True
        # A peer that was silent already has died then, not now.
        if now_s - self._heard_s < self._heartbeat_s / 2:
            self._heard(now_s)
        return self._ask(now_s)

    def on_resumed(self, now_s: float) -> None:
        """Another connection has taken the place of the broken one."""
        if self.verdict is not Verdict.LOST:
            self.is_broken = False
            self.on_receipt(now_s)

    def on_tick(self, now_s: float) -> SilenceAction:
        """Time has passed; to be called every `tick_s`, even if late."""
        self._forgive_own_stall(now_s)
        if self.verdict is Verdict.LOST:
            return SilenceAction.NONE
        if self._awaits_evidence and self._was_asked_a_heartbeat_ago(now_s):
            # No answer in time is an answer as well; a later one still counts.
            self._note(now_s, Evidence.UNKNOWN)
        if self._lose_if_due(now_s):
            return SilenceAction.LOST
        silent_s = now_s - self._heard_s
        if self._is_time_to_ping(silent_s):
            self._has_pinged = True
            return SilenceAction.SEND_PING
        if self._is_time_to_ask(now_s, silent_s):
            return self._ask(now_s)
        return SilenceAction.NONE

    def on_evidence(self, now_s: float, evidence: Evidence) -> Verdict:
        """Take what was found out about the peer's process."""
        if self.verdict is Verdict.LOST:
            return self.verdict
        if evidence is Evidence.GONE:
            return self._lose(evidence.value)
        if self.verdict is Verdict.SUSPECT:
            self._note(now_s, evidence)
            self._lose_if_due(now_s)
        return self.verdict

    # --- decisions -------------------------------------------------------------------

    def _is_time_to_ping(self, silent_s: float) -> bool:
        # Once is enough: what has been sent arrives, or the connection is of no use.
        has_to = not self._has_pinged and not self.is_broken
        return has_to and silent_s >= self._heartbeat_s

    def _is_time_to_ask(self, now_s: float, silent_s: float) -> bool:
        if self._asked_s is not None:
            return self._was_asked_a_heartbeat_ago(now_s)
        return self.is_broken or silent_s >= self._asks_after_s

    def _was_asked_a_heartbeat_ago(self, now_s: float) -> bool:
        return self._asked_s is not None and now_s - self._asked_s >= self._heartbeat_s

    def _ask(self, now_s: float) -> SilenceAction:
        self.verdict = Verdict.SUSPECT
        if not self._awaits_evidence:  # else the time for an answer runs already
            self._asked_s = now_s
        self._awaits_evidence = True
        return SilenceAction.ASK_EVIDENCE

    def _note(self, now_s: float, evidence: Evidence) -> None:
        self._awaits_evidence = False
        self._evidence = evidence
        if evidence is Evidence.BUSY:
            self._counted_s = now_s

    def _lose_if_due(self, now_s: float) -> bool:
        evidence = self._evidence
        if self.verdict is not Verdict.SUSPECT or evidence in (None, Evidence.BUSY):
            return False
        needed_s = self._lost_after_s
        if evidence is Evidence.TICKING:
            # A process looks as if its loop ran for a while after it has become busy.
            # It had a heartbeat to do so before it was pinged, and the evidence may be
            # another one old.
            needed_s = max(needed_s, 2 * self._heartbeat_s + FRESH_S)
        if now_s - self._counted_s < needed_s:
            return False
        self._lose(self._say(now_s - self._heard_s, evidence))
        return True

    def _lose(self, reason: str) -> Verdict:
        self.verdict = Verdict.LOST
        self.reason = reason
        return self.verdict

    def _say(self, silent_s: float, evidence: Evidence | None) -> str:
        if evidence is Evidence.TICKING:
            why = "its event loop runs, so the network between us does not"
        else:
            why = (evidence or Evidence.UNKNOWN).value
        if self.is_broken:
            return f"without a connection for {silent_s:.1f} s: {why}"
        return f"nothing was received from it for {silent_s:.1f} s: {why}"

    def _forgive_own_stall(self, now_s: float) -> None:
        """Do not blame the peer for what this worker missed while it stood still."""
        missed_s = now_s - self._ticked_s - self.tick_s
        self._ticked_s = now_s
        if missed_s < self.tick_s:  # the usual delay of a busy loop
            return
        self._heard_s = min(now_s, self._heard_s + missed_s)
        self._counted_s = min(now_s, self._counted_s + missed_s)
        self._evidence = None
        self._asked_s = now_s if self._awaits_evidence else None
