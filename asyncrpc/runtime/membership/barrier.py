"""Barriers of the group: who has come is passed round, without a centre.

`machine.barriers` decides; here are its messages, its connections and its errors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from asyncrpc.errors import (
    AsyncRpcError,
    BarrierBrokenError,
    BarrierTimeoutError,
    Outcome,
    UsageError,
    WorkerLostError,
)
from asyncrpc.ids import WorkerId
from asyncrpc.runtime.forms import (
    NUMBER,
    TEXT,
    Methods,
    ServiceMethods,
    array,
    each,
    mask,
    one_of,
)
from asyncrpc.runtime.machine.barriers import Barriers, Blame, Failure
from asyncrpc.runtime.membership.messenger import STALL_S, PeerMessenger
from asyncrpc.runtime.membership.ports import Peers
from asyncrpc.runtime.ports import Identity, PeerLink, Scheduler


class Barrier(ServiceMethods):
    """The barriers of one worker, one after the other; a `Service`."""

    name = "barrier"

    def __init__(
        self,
        identity: Identity,
        scheduler: Scheduler,
        peers: Peers,
        check_running: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            identity: whose barriers these are.
            scheduler: has the time, and runs the dials.
            peers: the others.
            check_running: raises NotStartedError if the worker does not run.
        """
        self._identity = identity
        self._scheduler = scheduler
        self._peers = peers
        self._check_running = check_running
        rank, size = identity.rank, identity.world_size
        has_rank = 0 <= rank < size
        self._size = size if has_rank else 0
        self._machine = Barriers(rank if has_rank else 0, max(self._size, 1))
        self._messenger = PeerMessenger(
            identity, scheduler, peers, self._write, self._on_gone
        )
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        here = array(number=NUMBER, passed=NUMBER, known=mask(self._size))
        failed = array(
            number=NUMBER,
            blame=one_of(Blame.__members__),
            problem=TEXT,
            missing=each(TEXT),
        )
        self.requests = Methods(self.name, {})
        self.notices = Methods(
            self.name,
            {"here": (here, self._on_here), "failed": (failed, self._on_failed)},
        )

    async def wait(self, timeout_s: float | None) -> None:
        """Pass one barrier; see `Worker.barrier`."""
        if not self._size:
            raise UsageError("a barrier needs ranks: this group was made without")
        now_s = self._scheduler.loop.time()
        end_s = None if timeout_s is None else now_s + timeout_s
        await self._line_up(timeout_s, end_s)
        try:
            await self._pass(timeout_s, end_s)
        finally:
            self._turn.release()

    async def _line_up(self, timeout_s: float | None, end_s: float | None) -> None:
        """Wait for the turn; who gives up before has not come to a barrier."""
        try:
            async with asyncio.timeout_at(end_s):
                await self._turn.acquire()  # whoever has it leaves at `close`, too
        except TimeoutError:
            raise BarrierTimeoutError(
                f"a barrier: in {timeout_s:g} s its turn did not come: another call of "
                "this worker waits at one",
                number=self._machine.number,
                missing=(),
            ) from None

    async def _pass(self, timeout_s: float | None, end_s: float | None) -> None:
        self._check_running()  # it may have ended while this waited for a turn
        machine = self._machine
        machine.come()
        try:
            async with asyncio.timeout_at(end_s):
                await self._until_over()
                # Who passes may leave at once: who relies on its message has it first.
                await self._messenger.wait_sent()
        except TimeoutError:
            if machine.is_waiting:
                self._give_up(f"waited {timeout_s:g} s for {self._absent()}")
                raise self._timed_out(timeout_s or 0.0) from None
        except BaseException as error:
            self._give_up(f"stopped waiting: {error!r}")
            raise
        finally:
            self._messenger.cancel()
        if machine.failure is not None:
            self._write_failure_to_all(machine.failure)
            raise self._error(machine.failure)

    async def _until_over(self) -> None:
        machine, is_silent = self._machine, False
        while machine.is_waiting:
            self._changed.clear()
            self._send(machine.due())
            has_changed = await self._wait_change(None if is_silent else STALL_S)
            is_silent = not has_changed
            if is_silent:
                self._send(machine.overdue())
                for rank in machine.awaited():
                    self._messenger.connect(rank)
        self._send(machine.due())

    async def _wait_change(self, patience_s: float | None) -> bool:
        """Wait until something has changed; False after so much silence."""
        if not self._machine.is_waiting:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._changed.wait()  # after a silence losses are watched for
        return self._changed.is_set()

    def _on_failed(self, link: PeerLink, value: list[Any]) -> None:
        number, blame, problem, missing, *_ = value
        self._messenger.check_rank(link)
        failure = Failure(Blame[blame], problem, tuple(missing))
        self._machine.hear_failure(number, failure)
        self._changed.set()

    def _on_here(self, link: PeerLink, value: list[Any]) -> None:
        number, passed, known, *_ = value
        self._messenger.check_rank(link)
        if self._machine.hear(number, passed, int.from_bytes(known, "little")):
            self._write(link)
        self._changed.set()

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail if it is not known that the worker had come."""
        self._on_gone(self._messenger.rank_of(peer.name), reason)

    async def close(self) -> None:
        """Tell those who do not know it yet that the last barrier has been passed.

        It comes before the end of the connection: so that is not taken for a death.
        One that this worker still waits at, it gives up: nobody would end that.

        Cancellation:
            It never waits.
        """
        if self._machine.has_passed:
            for link in self._others():
                self._write(link)
        self._give_up("shut down")
        self._changed.set()

    def _on_gone(self, rank: int, reason: str) -> None:
        name = self._messenger.name_of(rank)
        problem = f"worker {name!r} is gone: {reason}"
        self._machine.on_lost(rank, Failure(Blame.LOST, problem, (name,)))
        self._changed.set()

    def _send(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._messenger.send(rank)

    def _write(self, link: PeerLink) -> None:
        """Write what is known of the present barrier."""
        machine = self._machine
        if machine.failure is not None:
            self._write_failure(link, machine.failure)
            return
        known = machine.known.to_bytes((self._size + 7) // 8, "little")
        link.notify(
            self.name, "here", [machine.number, machine.passed, known], at_once=True
        )

    def _write_failure(self, link: PeerLink, failure: Failure) -> None:
        fields = [self._machine.number, failure.blame.name, failure.problem]
        link.notify(self.name, "failed", [*fields, list(failure.missing)])

    def _write_failure_to_all(self, failure: Failure) -> None:
        """Tell those who are connected, who tell those they are connected to."""
        for link in self._others():
            self._write_failure(link, failure)

    def _others(self) -> list[PeerLink]:
        name = self._identity.name
        return [one for one in self._peers.links if one.peer.name != name]

    def _give_up(self, what: str) -> None:
        number = self._machine.number
        problem = f"worker {self._identity.name!r} gave up barrier {number}: it {what}"
        failure = Failure(Blame.LATE, problem, self._missing())
        if self._machine.is_waiting:
            self._machine.fail(failure)
            self._write_failure_to_all(failure)

    def _missing(self) -> tuple[str, ...]:
        return tuple(map(self._messenger.name_of, self._machine.missing))

    def _absent(self) -> str:
        return ", ".join(map(repr, self._missing()))

    def _timed_out(self, timeout_s: float) -> AsyncRpcError:
        missing = self._missing()
        return BarrierTimeoutError(
            f"barrier {self._machine.number}: in {timeout_s:g} s these did not come: "
            f"{self._absent()}; it has failed for all, the next one can be used",
            number=self._machine.number,
            missing=missing,
        )

    def _error(self, failure: Failure) -> AsyncRpcError:
        if failure.blame is Blame.LOST:
            return WorkerLostError(
                failure.problem,
                function="barrier",
                to="the group",
                outcome=Outcome.UNKNOWN,
            )
        return BarrierBrokenError(
            failure.problem, number=self._machine.number, missing=failure.missing
        )
