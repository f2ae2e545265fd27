"""The two ends of one connection, and a network between them, as plain values.

Transports have the number of the attempt that brought them.  What is on its way may
arrive in any order; a transport may break at any moment, and each end notices by
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from asyncrpc.core.links.machine.reconnect import (
    CandidateVerdict,
    Reconnect,
    ReconnectEvent,
    ReconnectState,
)


@dataclass(frozen=True, slots=True)
class End:
    """One end.

    Attributes:
        state: of its machine.
        attempt: of its machine.
        transport: that it reads from; -1 while it is broken.
        candidate: at the side that dials, the attempt that is further than others.
    """

    state: ReconnectState = ReconnectState.WHOLE
    attempt: int = 0
    transport: int = 0
    candidate: int = 0

    def machine(self) -> Reconnect:
        machine = Reconnect()
        machine.state, machine.attempt = self.state, self.attempt
        return machine

    def after(self, machine: Reconnect, transport: int, candidate: int = 0) -> End:
        return End(machine.state, machine.attempt, transport, candidate)


@dataclass(frozen=True, slots=True)
class World:
    """Both ends, and what is between them.

    Attributes:
        dialer: the end that dials again.
        acceptor: the other.
        offers: attempts whose HELLO is on its way.
        answers: attempts whose answer is on its way, and what it says.
        dead: transports that have broken; an end that reads from one will notice.
        attempts: how many the dialer may still make.
        breaks: how often something may still break.
    """

    dialer: End
    acceptor: End
    offers: frozenset[int] = frozenset()
    answers: frozenset[tuple[int, str]] = frozenset()
    dead: frozenset[int] = frozenset()
    attempts: int = 0
    breaks: int = 0

    def successors(self) -> Iterator[World]:
        """Yield every world that the next event can lead to."""
        yield from self._breaks()
        yield from self._notices()
        if self.attempts:
            yield from self._claims()
        for number in self.offers:
            yield self._deliver_offer(number)
        for number, verdict in self.answers:
            yield self._deliver_answer(number, verdict)

    def _breaks(self) -> Iterator[World]:
        if not self.breaks:
            return
        used = {self.dialer.transport, self.acceptor.transport, self.dialer.candidate}
        for number in used - self.dead - {-1}:
            if number or 0 in (self.dialer.transport, self.acceptor.transport):
                yield replace(self, dead=self.dead | {number}, breaks=self.breaks - 1)

    def _notices(self) -> Iterator[World]:
        dialer, acceptor = self.dialer, self.acceptor
        if dialer.transport in self.dead:
            yield replace(self, dialer=_broken(dialer))
        if acceptor.transport in self.dead:
            yield replace(self, acceptor=_broken(acceptor))
        if dialer.candidate in self.dead and dialer.candidate:
            machine = dialer.machine()
            assert machine.on(ReconnectEvent.RELEASE)
            yield replace(self, dialer=dialer.after(machine, dialer.transport))

    def _claims(self) -> Iterator[World]:
        """A candidate has proved itself: also while the old transport seems to work."""
        end = self.dialer
        dead = self.dead
        if end.state is ReconnectState.WHOLE:
            dead |= {end.transport}
            end = _broken(end)
        machine = end.machine()
        number = machine.claim()
        if number:
            end = end.after(machine, end.transport, number)
            offers = self.offers | {number}
            left = self.attempts - 1
            yield replace(self, dialer=end, offers=offers, dead=dead, attempts=left)

    def _deliver_offer(self, number: int) -> World:
        end, dead = self.acceptor, self.dead
        machine = end.machine()
        verdict = machine.on_offer(number)
        if not verdict:
            if machine.on(ReconnectEvent.BROKE):  # what was there is given up
                dead |= {end.transport}
            assert machine.on(ReconnectEvent.RESUMED)
            end = end.after(machine, number)
        answers = self.answers | {(number, verdict)}
        offers = self.offers - {number}
        return replace(self, acceptor=end, offers=offers, answers=answers, dead=dead)

    def _deliver_answer(self, number: int, verdict: str) -> World:
        end, dead = self.dialer, self.dead
        answers = self.answers - {(number, verdict)}
        if number in dead:  # the answer is lost with what carried it
            return replace(self, answers=answers)
        machine = end.machine()
        answer = machine.on_answer(
            verdict, is_same_life=True, is_candidate=end.candidate == number
        )
        if answer is CandidateVerdict.RESUME:
            assert machine.on(ReconnectEvent.RELEASE)
            assert machine.on(ReconnectEvent.RESUMED)
            end = end.after(machine, number)
        else:
            dead |= {number}
        return replace(self, dialer=end, answers=answers, dead=dead)


def _broken(end: End) -> End:
    machine = end.machine()
    assert machine.on(ReconnectEvent.BROKE)
    return end.after(machine, -1)
