"""Events reach the figures, each once, whichever threads note them."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from asyncrpc.tools.observability.event_queue import FOLDED_MIN, EventQueue, Fields


class Folded:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.events: list[Fields] = []
        self.queue = EventQueue(self.fold, self.lock)

    def fold(self, events: Iterable[Fields]) -> None:
        assert self.lock.locked()
        self.events += events

    def read(self) -> list[Fields]:
        with self.lock:
            self.queue.drain()
            return self.events


def test_few_events_wait_for_who_reads() -> None:
    folded = Folded()
    folded.queue.put((1,))
    assert folded.events == []
    assert folded.read() == [(1,)]


def test_many_events_are_folded_by_who_notes_them() -> None:
    folded = Folded()
    for number in range(FOLDED_MIN):
        folded.queue.put((number,))
    assert folded.events == [(number,) for number in range(FOLDED_MIN)]


def test_who_notes_an_event_does_not_wait_for_who_reads() -> None:
    folded = Folded()
    with folded.lock:
        for number in range(3 * FOLDED_MIN):
            folded.queue.put((number,))
        assert folded.events == []
    folded.queue.put((-1,))
    assert len(folded.events) == 3 * FOLDED_MIN + 1


def test_no_event_is_lost_or_counted_twice_between_threads() -> None:
    folded = Folded()
    each, threads = 5_000, 4

    def note(first: int) -> None:
        for number in range(first, first + each):
            folded.queue.put((number,))
            if not number % 100:
                folded.read()

    running = [
        threading.Thread(target=note, args=(number * each,))
        for number in range(threads)
    ]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert sorted(folded.read()) == [(number,) for number in range(each * threads)]
