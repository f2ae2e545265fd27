"""How a worker shows itself to programs on its host, from its start to its end.

The local socket, the note for the commands and the ages of waits are there before
anybody looks.  What answers a look is not loaded with them: a process that soon ends
does without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from asyncrpc.core.loop.threads import in_new_thread
from asyncrpc.core.parts import Parts
from asyncrpc.extend import Route, WorkerId
from asyncrpc.tools.inspection.ages import LOOKS, SAMPLE_S, WaitAges
from asyncrpc.tools.inspection.local_socket import LocalDoor, is_supported
from asyncrpc.tools.inspection.run_note import RunNoteFile, entry_in

if TYPE_CHECKING:
    from asyncrpc.tools.inspection.stalls import StallWatch

PRESENCE: Final = "presence"


class HostPresence:
    """Shows one worker to its host; a `Service` that takes no messages.

    Attributes:
        ages: knows how long the worker's tasks have waited.
        since_s: when the worker began to listen.
        stalls: logs by itself why the worker is stuck; None if not asked for.
    """

    name = PRESENCE
    routes: tuple[Route, ...] = ()

    def __init__(self, worker: Parts) -> None:
        self._worker = worker
        self._after_s = after_s = worker.options.stall_after_s
        sample_s = SAMPLE_S if after_s is None else min(SAMPLE_S, after_s / LOOKS)
        self.ages = WaitAges(worker.loop, sample_s=sample_s)
        self.since_s = worker.recorder.now_s()
        self.stalls: StallWatch | None = None
        self._note = RunNoteFile(worker.identity, entry_in())
        self._door = LocalDoor(worker, self.ages)

    def on_listening(self, addresses: Sequence[str]) -> None:
        """Let observers on this host find the worker, and watch for stalls."""
        worker, after_s = self._worker, self._after_s
        self.since_s = worker.recorder.now_s()
        self.ages.start()
        if is_supported:
            self._door.open(addresses)
        if self._note.is_wanted:
            worker.start_task(
                in_new_thread(worker.loop, lambda: self._note.write(addresses))
            )
        if after_s is not None and after_s < math.inf:
            from asyncrpc.tools.inspection.stalls import watch  # noqa: PLC0415  (heavy)

            self.stalls = watch(worker, self.ages, after_s)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Do nothing: no state of peers is kept."""

    async def close(self) -> None:
        """Close the local socket, and stop looking at tasks."""
        if self.stalls is not None:
            self.stalls.close()
        self._door.close()
        self.ages.stop()
        if self._note.is_wanted:
            await in_new_thread(self._worker.loop, self._note.remove)
