"""A network of messages that may be late, lost, repeated and out of order.

For machines that do no I/O: register a function per name, send anything, and run the
loop.  Unlike `asyncrpc.testing.network`, nothing here is a stream; a protocol that
survives this survives every transport.  The same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from asyncrpc.errors import UsageError

DELAY_S: Final = 0.001  # mean of one way, if no rule says otherwise
TRACE_MAX: Final = 100_000  # events kept
Receive: TypeAlias = Callable[[str, object], None]  # (sender, message)


class MessageLink:
    """The rules for messages between two names, in both directions alike."""

    def __init__(self) -> None:
        self.mean_s = DELAY_S
        self.loss = 0.0
        self.repetition = 0.0
        self.is_ordered = False
        self.is_cut = False
        self.dropped: tuple[type, ...] = ()
        self.last_arrival_s: dict[str, float] = {}  # by receiver

    def delay(self, mean_s: float) -> None:
        """Draw delays from an exponential distribution of this mean, in seconds."""
        self.mean_s = mean_s

    def lose(self, probability: float) -> None:
        self.loss = _probability(probability)

    def repeat(self, probability: float) -> None:
        """Deliver this share of the messages again, and of the repetitions as well."""
        self.repetition = _probability(probability)
        if probability == 1:
            raise UsageError("a message that is always repeated never ends; use 0.99")

    def reorder(self, *, allowed: bool) -> None:
        """Let messages overtake each other (they may, unless this says no)."""
        self.is_ordered = not allowed

    def drop(self, *kinds: type) -> None:
        """Lose every message of these classes; without classes, end this."""
        self.dropped = kinds

    def partition(self) -> None:
        """Lose everything that would arrive, until `heal`."""
        self.is_cut = True

    def heal(self) -> None:
        self.is_cut = False


class MessageNetwork:
    """Names, and messages under way between them."""

    def __init__(
        self, seed: int, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        # What happened, and when: `(virtual seconds, words)`.
        self.trace: deque[tuple[float, str]] = deque(maxlen=TRACE_MAX)
        self.in_flight = 0  # messages, repetitions included, that have not arrived
        self._rng = random.Random(seed)
        self._given_loop = loop
        self._receivers: dict[str, Receive] = {}
        self._links: dict[tuple[str, str], MessageLink] = {}
        self._quiet: asyncio.Future[None] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._given_loop or asyncio.get_running_loop()

    def register(self, name: str, receive: Receive) -> None:
        """Call `receive(sender, message)` for each message that arrives at `name`.

        Registering again replaces the function, as for a restarted worker.
        """
        self._receivers[name] = receive

    def crash(self, name: str) -> None:
        """Forget `name`; messages that arrive for it are lost."""
        self._receivers.pop(name, None)

    def between(self, first: str, second: str) -> MessageLink:
        """Return the rules between two names, in whichever order they are named."""
        ends = (min(first, second), max(first, second))
        return self._links.setdefault(ends, MessageLink())

    def send(self, sender: str, receiver: str, message: object) -> None:
        """Send a message, which may arrive never, once, or several times."""
        link = self.between(sender, receiver)
        if isinstance(message, link.dropped) or self._rng.random() < link.loss:
            self._note(f"{sender}->{receiver}: lost {message!r}")
            return
        self._launch(link, sender, receiver, message)
        while self._rng.random() < link.repetition:
            self._launch(link, sender, receiver, message)

    async def quiet(self) -> None:
        while self.in_flight:
            self._quiet = self.loop.create_future()
            await self._quiet

    def _launch(
        self, link: MessageLink, sender: str, receiver: str, message: object
    ) -> None:
        delay_s = self._rng.expovariate(1 / link.mean_s) if link.mean_s else 0.0
        arrival_s = self.loop.time() + delay_s
        if link.is_ordered:
            # Strictly later: a loop may run timers of one moment in any order.
            last_s = link.last_arrival_s.get(receiver, 0.0)
            arrival_s = max(arrival_s, math.nextafter(last_s, math.inf))
        link.last_arrival_s[receiver] = arrival_s
        self.in_flight += 1
        self.loop.call_at(arrival_s, self._arrive, sender, receiver, message)

    def _arrive(self, sender: str, receiver: str, message: object) -> None:
        self.in_flight -= 1
        receive = self._receivers.get(receiver)
        if receive is None or self.between(sender, receiver).is_cut:
            self._note(f"{sender}->{receiver}: lost {message!r}")
        else:
            self._note(f"{sender}->{receiver}: {message!r}")
            receive(sender, message)
        if not self.in_flight and self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    def _note(self, event: str) -> None:
        self.trace.append((self.loop.time(), event))


def _probability(value: float) -> float:
    if not 0 <= value <= 1:
        raise UsageError(f"a probability must be between 0 and 1, not {value}")
    return value
