"""The board: memory that all ranks of a group on one host see, and what they post.

Each rank has words of its own, in cache lines of their own, which only it writes:

    stage     how far it is: 4 * number of the collective, and 0 begun (and over with
              all before) or 1 published
    here      1: the rank has opened the board
    asleep    the stage that it sleeps for; 0: it is awake
    failed    by number of the collective modulo `FAILED_KEPT`: the number + 1
    given, combined, taken
              how many pieces of a collective: number << 32 | pieces; see `windows`

and, in turn for even and odd collectives, a *note*, which says what the rank believes
the collective to be, and a *slot*, which holds small tensors.  A note and a slot are
written again two collectives later; before that all ranks must have ended the one in
between.  So in the ordinary case no rank waits.  Last come the windows.

A waiting rank looks at the words for a while, then sleeps; the rank that completes what
another sleeps for sends it a message.  The others see a store before the writer reads
what comes after it (`_fence`), so one of the two always notices.

Only for x86: elsewhere another process may see what is written in another order.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from asyncrpc.core.loop.clock import now_s
from asyncrpc.errors import CollectiveError, LocalProtocolError

is_supported: Final = platform.machine() in ("x86_64", "AMD64")

BEGUN, PUBLISHED = range(2)

NOTE_BYTES: Final = 16 << 10
FAILED_KEPT: Final = 64
DEPTH: Final = 2  # windows of one rank for another: one is filled, one is read
_LINE_WORDS: Final = 8  # 64 bytes
_HERE: Final = 1  # in the line of `stage`
_ASLEEP: Final = _LINE_WORDS
GIVEN, COMBINED, TAKEN = (line * _LINE_WORDS for line in (2, 3, 4))
_FAILED: Final = 5 * _LINE_WORDS
_WORDS: Final = _FAILED + FAILED_KEPT
_WORD_BYTES: Final = 8
_PIECES_BITS: Final = 32
_PAGE_BYTES: Final = 4096
# All slots of one collective, and all windows; of large groups each is smaller.
_SLOTS_BYTES_MAX: Final = 1 << 20
_SLOT_BYTES_MAX: Final = 128 << 10
_WINDOWS_BYTES_MAX: Final = 16 << 20
_WINDOW_BYTES_MAX: Final = 256 << 10

# How long the loop looks for others before it sleeps: as long as being woken takes.
LOOK_S: Final = 100e-6
_YIELDS: Final = 200  # of a thread that waits for others, before it naps
_NAP_S: Final = 100e-6


def slot_bytes(size: int) -> int:
    """Return how large a rank's slot is, in a group of `size`."""
    return _part(_SLOTS_BYTES_MAX, size, _SLOT_BYTES_MAX)


def window_bytes(size: int) -> int:
    """Return how large a window is, in a group of `size`."""
    return _part(_WINDOWS_BYTES_MAX, size * size * DEPTH, _WINDOW_BYTES_MAX)


def board_bytes(size: int) -> int:
    """Return how large the board of a group of `size` is."""
    each = _WORDS * _WORD_BYTES + 2 * (NOTE_BYTES + slot_bytes(size))
    return size * (each + size * DEPTH * window_bytes(size))


def _part(total: int, parts: int, limit: int) -> int:
    return max(min(limit, total // parts // _PAGE_BYTES * _PAGE_BYTES), _PAGE_BYTES)


class Board:
    """The board, as one rank sees it."""

    def __init__(self, memory: torch.Tensor, rank: int, size: int) -> None:
        self.size = size
        self.slot_bytes = slot_bytes(size)
        self.window_bytes = window_bytes(size)
        self._memory = memory
        bare: Any = memory.numpy()  # a buffer, which mypy does not know
        words, notes, slots, windows = (
            size * _WORDS * _WORD_BYTES,
            2 * size * NOTE_BYTES,
            2 * size * self.slot_bytes,
            size * size * DEPTH * self.window_bytes,
        )
        first = words + notes
        last = first + slots
        self._words = memoryview(bare)[:words].cast("q")
        self._notes = memoryview(bare)[words : words + notes]
        self._slots = memory[first:last].view(2, size, self.slot_bytes)
        self._windows = memory[first + slots : first + slots + windows].view(
            size, DEPTH, size, self.window_bytes
        )
        self._mine = rank * _WORDS
        self._stages = range(0, size * _WORDS, _WORDS)
        self._lock = threading.Lock()

    def open(self) -> None:
        """Show the other ranks that this one sees the board."""
        self._words[self._mine + _HERE] = 1

    @property
    def is_shared(self) -> bool:
        """Return whether all ranks see this board; they have opened it."""
        return all(self._words[stage + _HERE] for stage in self._stages)

    # --- notes and slots -------------------------------------------------------------

    def write_note(self, number: int, rank: int, text: bytes) -> None:
        """Write this rank's note of a collective."""
        if len(text) > NOTE_BYTES - 4:
            raise CollectiveError(
                f"the shapes of this collective take {len(text)} bytes; the limit is "
                f"{NOTE_BYTES - 4}: use fewer or simpler tensors"
            )
        at = self._note_at(number, rank)
        self._notes[at : at + 4] = len(text).to_bytes(4, "little")
        self._notes[at + 4 : at + 4 + len(text)] = text

    def note(self, number: int, rank: int) -> memoryview:
        """Return a rank's note of a collective."""
        at = self._note_at(number, rank)
        length = int.from_bytes(self._notes[at : at + 4], "little")
        if length > NOTE_BYTES - 4:
            raise LocalProtocolError(f"the board has a note of {length} bytes")
        return self._notes[at + 4 : at + 4 + length]

    def slot(self, number: int, rank: int) -> torch.Tensor:
        """Return a rank's slot for a collective: uint8, (slot_bytes,)."""
        slot: torch.Tensor = self._slots[number % 2, rank]
        return slot

    def window(self, rank: int, turn: int, lane: int) -> torch.Tensor:
        """Return a window of a rank: uint8, (window_bytes,)."""
        window: torch.Tensor = self._windows[rank, turn, lane]
        return window

    def _note_at(self, number: int, rank: int) -> int:
        return (number % 2 * self.size + rank) * NOTE_BYTES

    # --- words -----------------------------------------------------------------------

    def post(self, number: int, stage: int) -> list[int]:
        """Post how far this rank is; return the ranks that must be woken for it."""
        words = self._words
        words[self._mine] = 4 * number + stage
        self._fence()
        return [
            rank
            for rank, at in enumerate(self._stages)
            if words[at + _ASLEEP] and self._is_reached(words[at + _ASLEEP])
        ]

    def is_reached(self, number: int, stage: int) -> bool:
        """Return whether every rank is this far."""
        return self._is_reached(4 * number + stage)

    def _is_reached(self, wanted: int) -> bool:
        words = self._words
        for at in self._stages:  # noqa: SIM110  (half the time of a generator)
            if words[at] < wanted:
                return False
        return True

    def look(self, number: int, stage: int) -> bool:
        """Poll for a moment; return whether every rank is this far."""
        wanted = 4 * number + stage
        if self._is_reached(wanted):
            return True
        end_s = now_s() + LOOK_S
        while now_s() < end_s:
            os.sched_yield()  # another rank may need this core
            if self._is_reached(wanted):
                return True
        return False

    def fall_asleep(self, number: int, stage: int) -> None:
        """Ask to be woken when every rank is this far.  Look again before sleeping."""
        self._words[self._mine + _ASLEEP] = 4 * number + stage
        self._fence()

    def wake_up(self) -> None:
        """Withdraw the request to be woken."""
        self._words[self._mine + _ASLEEP] = 0

    def fail(self, number: int) -> None:
        """Post that this rank has given a collective up."""
        self._words[self._mine + _FAILED + number % FAILED_KEPT] = number + 1

    def failed(self, number: int) -> list[int]:
        """Return the ranks that have given a collective up."""
        cell = _FAILED + number % FAILED_KEPT
        return [
            rank
            for rank, at in enumerate(self._stages)
            if self._words[at + cell] == number + 1
        ]

    def post_pieces(self, counter: int, number: int, pieces: int) -> None:
        """Post how many pieces this rank has given, combined or taken."""
        self._words[self._mine + counter] = number << _PIECES_BITS | pieces

    def wait_for_pieces(
        self,
        counter: int,
        number: int,
        pieces: int,
        ranks: Iterable[int],
        check: Callable[[], None],
    ) -> None:
        """Wait, in a thread, until ranks gave, combined or took so many pieces."""
        if pieces <= 0:  # reached from the beginning
            return
        words, wanted = self._words, number << _PIECES_BITS | pieces
        for rank in ranks:
            at, looks = rank * _WORDS + counter, 0
            while words[at] < wanted:
                looks += 1
                if looks < _YIELDS:
                    os.sched_yield()  # without the GIL; sleep(0) takes 50 us
                else:
                    check()
                    time.sleep(_NAP_S)

    def _fence(self) -> None:
        """Make earlier stores visible before later reads."""
        with self._lock:
            pass
