"""The ring: names in the order of their hashes, and how news travels along it.

Every worker has a place on a circle of 2^64, by the hash of its name.  It can compute,
without asking, which worker comes after it, and which comes first after it at the
distances 1, 2, 4, ..., 2^63: its *fingers*, about log2(n) different workers.  News goes
along fingers only, so a worker speaks to few others however many changes there are, and
a place that is taken or given up changes only the fingers that point there.

A message carries a limit: its receiver passes it on to its fingers before that limit,
each with the next one as its limit.  So n - 1 messages reach all, the last one after
about log2(n) steps, and no worker sends more than log2(n) of them.

Sans-IO.  It knows workers only by their names.

Source: El-Ansary, Alima, Brand, Haridi, "Efficient broadcast in structured peer-to-peer
networks", 2003; the ring is that of Chord (Stoica et al., 2001).
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Final

BITS: Final = 64
CIRCLE: Final = 1 << BITS
PLACES_MAX: Final = 65_536  # places kept, each of which takes 1.5 us to compute


@functools.lru_cache(maxsize=PLACES_MAX)
def place_of(name: str) -> int:
    """Return the place of a worker on the circle; the same everywhere."""
    digest = hashlib.blake2b(name.encode(), digest_size=BITS // 8).digest()
    return int.from_bytes(digest, "big")


class Ring:
    """Names by their places."""

    def __init__(self) -> None:
        self._places: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: str) -> bool:
        place = (place_of(name), name)
        at = bisect.bisect_left(self._places, place)
        return at < len(self._places) and self._places[at] == place

    def __iter__(self) -> Iterator[str]:
        return (name for _, name in self._places)

    def add(self, name: str) -> None:
        """Give a name its place.  Idempotent."""
        place = (place_of(name), name)
        at = bisect.bisect_left(self._places, place)
        if at == len(self._places) or self._places[at] != place:
            self._places.insert(at, place)

    def update(self, names: Iterable[str]) -> None:
        """Give many names their places at once.  Idempotent."""
        # Added one by one, each would move half of the others: for 65,536, seconds.
        self._places = sorted(
            {*self._places, *((place_of(name), name) for name in names)}
        )

    def discard(self, name: str) -> None:
        """Remove a name, if it is there."""
        place = (place_of(name), name)
        at = bisect.bisect_left(self._places, place)
        if at < len(self._places) and self._places[at] == place:
            del self._places[at]

    def after(self, place: int) -> str:
        """Return the first name at `place` or after it; empty if there is none."""
        if not self._places:
            return ""
        at = bisect.bisect_left(self._places, (place % CIRCLE, ""))
        return self._places[at % len(self._places)][1]

    def between(self, start: int, end: int) -> list[str]:
        """Return the names at places from `start` to before `end`; `start` <= `end`."""
        first = bisect.bisect_left(self._places, (start, ""))
        last = bisect.bisect_left(self._places, (end, ""), first)
        return [name for _, name in self._places[first:last]]

    def next_to(self, name: str) -> str:
        """Return the name after another; empty if there is no other."""
        following = self.after(place_of(name) + 1)
        return "" if following == name else following

    def fingers(self, name: str) -> list[str]:
        """Return a worker's fingers: the first names after the powers of two."""
        here, fingers = place_of(name), list[str]()
        step = 1
        while step < CIRCLE:
            finger = self.after(here + step)
            if not finger or finger == name:
                break
            distance = (place_of(finger) - here) % CIRCLE
            if distance < step:  # around the circle: the first finger once more
                break
            fingers.append(finger)
            step = 1 << distance.bit_length()
        return fingers

    def within(self, name: str, start: int, end: int) -> bool:
        """Return whether a name lies after `start` and before `end`, going round."""
        span = (end - start) % CIRCLE or CIRCLE  # the same place: the whole circle
        return 0 < (place_of(name) - start) % CIRCLE < span

    def routes(self, name: str, limit: int) -> list[tuple[str, int]]:
        """Return the workers that a worker informs of news that it got with `limit`.

        Args:
            limit: the end of its part of the circle; its own place means the whole
                circle.
        """
        here = place_of(name)
        informed = [
            finger for finger in self.fingers(name) if self.within(finger, here, limit)
        ]
        limits = [*(place_of(informed_name) for informed_name in informed[1:]), limit]
        return list(zip(informed, limits, strict=False))

    def route_past(self, name: str, limit: int) -> tuple[str, int] | None:
        """Return the worker to inform instead of one that cannot be reached."""
        start = place_of(name)
        following = self.after(start + 1)
        if not following or not self.within(following, start, limit):
            return None
        return following, limit
