"""The running collectives of one group, along the path that all ranks have agreed on.

The ranks agree once, in a collective of its own that the first one begins.  Whatever
ends a collective here early ends it for all ranks, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from asyncrpc.core.serde import words_of
from asyncrpc.core.torch_modes import plain_steps
from asyncrpc.errors import CollectiveError, GroupChangedError
from asyncrpc.extend import ServiceHost
from asyncrpc.parallel.collectives.machine.operations import (
    CollectiveFailure,
    Descriptor,
)
from asyncrpc.parallel.collectives.matching import CollectiveRun, Matching
from asyncrpc.parallel.collectives.path import Path, open_path

# Collectives of one group that run at a time here; more wait their turn.  This bounds
# what a slow rank must keep for the ranks ahead of it.
RUNNING_MAX: Final = 32


class CollectiveRuns:
    """Runs the collectives of one group at this rank.

    Attributes:
        opening: agrees with the other ranks on the path; None: it has not begun.
    """

    def __init__(self, host: ServiceHost, matching: Matching) -> None:
        self.opening: asyncio.Task[Path] | None = None
        self._host = host
        self._matching = matching
        self._turn = asyncio.Semaphore(RUNNING_MAX)

    @asynccontextmanager
    async def run(
        self, descriptor: Descriptor, timeout_s: float | None
    ) -> AsyncIterator[tuple[CollectiveRun, Path]]:
        """Run one collective: number it, watch it, and fail it for all if it fails.

        Args:
            timeout_s: seconds that it may take; None: no limit.
        """
        self._host.check_on_loop(f"Group.{descriptor.operation}")
        opening = self.start_opening()
        run = self._matching.begin(descriptor, timeout_s)
        try:
            async with self._turn:
                if not opening.done():  # others may never come to it
                    await run.until_done(opening)
                yield run, await opening
        except asyncio.CancelledError:
            run.abandon("cancelled it")
            raise
        except CollectiveError:
            raise
        except Exception as error:
            run.abandon(f"failed in it: {words_of(error)}")
            raise
        finally:
            run.end()

    def start_opening(self) -> asyncio.Task[Path]:
        """Begin the collective in which all agree on the path, if it has not begun."""
        if self.opening is None:
            run = self._matching.begin(Descriptor("open"), None)
            self.opening = self._host.start_task(self._open(run))
            # A refusal waits for nothing: its outcome may never be awaited.
            self.opening.add_done_callback(lambda it: it.cancelled() or it.exception())
        return self.opening

    @plain_steps
    async def _open(self, run: CollectiveRun) -> Path:
        """Agree with the others on the path that all collectives take."""
        try:
            return await open_path(run)
        except BaseException as error:
            # Some ranks may have agreed, and cannot be made to ask again.
            failure = CollectiveFailure(GroupChangedError.code, str(error), ())
            self._matching.lose(run.operation.failure or failure)
            raise
        finally:
            run.end()
