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


def test_few_events_are_folded_by_the_reader() -> None:
    folded = Folded()
    folded.queue.put((1,))
    assert folded.events == []
    assert folded.read() == [(1,)]


def test_many_events_are_folded_by_the_writer() -> None:
    folded = Folded()
    for number in range(FOLDED_MIN):
        folded.queue.put((number,))
    assert folded.events == [(number,) for number in range(FOLDED_MIN)]


def test_writer_does_not_wait_for_the_reader() -> None:
    folded = Folded()
    with folded.lock:
        for number in range(3 * FOLDED_MIN):
            folded.queue.put((number,))
        assert folded.events == []
    folded.queue.put((-1,))
    assert len(folded.events) == 3 * FOLDED_MIN + 1


def test_events_of_several_threads_are_counted_once_each() -> None:
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
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert sorted(folded.read()) == [(number,) for number in range(each * threads)]
