"""The rendezvous at a torch store: a file, or the process that listens at a port.

The work at the store is linear in the number of workers: each adds its record once, and
reads all once.  Store calls block, so they run in a thread of their own, never on the
loop; none lasts long, so that a worker that is ended while it waits is gone soon.  Only
if the host is stopped, torch waits without an end: that thread is left behind.

For workers that come back a run leaves its name, so that no worker takes another
program's store for that of its own group; the last incarnation of each rank that came;
and the offer: some members that run.  None of it is part of a meeting or an attempt: it
stays as long as the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgpack
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    PrefixStore,
)

from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.loop.clock import Clock
from asyncrpc.core.loop.threads import Done, outcome_to
from asyncrpc.core.loop.waits import waits
from asyncrpc.core.members import (
    Member,
    OfferedGroup,
    RunningGroup,
    missing_error,
    wait_at_start,
)
from asyncrpc.core.membership.machine.keeping import Finding
from asyncrpc.core.membership.store_places import (
    KNOCK_S,
    OPEN_S,
    StorePlace,
    TcpPlace,
)
from asyncrpc.errors import MalformedError, RendezvousTimeoutError, UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

REFUSED_S: Final = 1.0  # until an offer whose members did not answer is tried again


class OfferBoard:
    """The offers of a run, as one worker reads and writes them; in threads."""

    def __init__(self, prefix: str, run: str, rank: int) -> None:
        self.run = run
        self._run_key = f"{prefix}/run"
        self._life_key = f"{prefix}/life/{rank}"
        self._offer_key = f"{prefix}/offer"
        self._refused = b""
        self._refused_until_s = 0.0
        self._read = b""

    def arrive(self, store: Store, member: Member) -> None:
        """Leave the name of the run, if no other worker has, and this incarnation."""
        store.compare_set(self._run_key, "", self.run)
        if self._is_ours(store):
            store.set(self._life_key, str(member.incarnation))

    def look(self, store: Store) -> Finding:
        """Return what is there."""
        run = _get(store, self._run_key).decode()
        holder = Incarnation(int(_get(store, self._life_key) or b"0"))
        try:
            offered = _members(_get(store, self._offer_key))
        except MalformedError:  # it is replaced
            offered = ()
        return Finding(run, holder, tuple(member.incarnation for member in offered))

    def write(self, store: Store, members: Iterable[Member]) -> None:
        """Leave an offer in place of the former one."""
        packed: bytes = msgpack.packb([member.encode() for member in members])
        store.set(self._offer_key, packed)  # type: ignore[arg-type]

    def read(self, store: Store) -> OfferedGroup | None:
        """Return the offer, unless its members were just now found not to answer."""
        if not store.check([self._offer_key]) or not self._is_ours(store):
            return None
        packed = store.get(self._offer_key)
        if packed == self._refused and _now_s() < self._refused_until_s:
            return None
        self._read = packed
        return OfferedGroup(_members(packed))

    def refuse(self) -> None:
        """Take note that no member of the offer that was read last answers."""
        self._refused = self._read
        self._refused_until_s = _now_s() + REFUSED_S

    def _is_ours(self, store: Store) -> bool:
        return _get(store, self._run_key).decode() == self.run


def _get(store: Store, key: str) -> bytes:
    value: bytes = store.get(key) if store.check([key]) else b""
    return value


def _members(packed: bytes) -> Sequence[Member]:
    if not packed:
        return ()
    try:
        return [Member.decode(fields) for fields in msgpack.unpackb(packed)]
    except (TypeError, ValueError) as error:  # msgpack raises these as well
        raise MalformedError(f"the offer at the meeting point: {error}") from error


T = TypeVar("T")
PREFIX: Final = "asyncrpc/rpc"
_WORD: Final = f"{PREFIX}/word"
_ALL: Final = "all"
_RUNNING: Final = "running"  # a group runs: the workers join it, or meet again
_POLL_S: Final = 0.02
_POLLS_PER_LOOK: Final = 10  # between checks that no other process has this place
_POLLS_PER_OFFER: Final = 3  # between looks for an offer
_POLLS_PER_ROLL: Final = 20  # at rank 0, between looks for the missing ranks
_FIRST_ROLL: Final = 5
_POLL_MAX_S: Final = 0.1  # ten questions a second from each worker that waits long
# Workers that came may take so long to learn that others did not.
_LAST_WORD_S: Final = 1.0
_OTHERS_S: Final = 1.0  # between checks whether another process hosts a store
_OVER_S: Final = 1.0  # that a job may take beyond its limit

_now_s: Final = Clock().now_s


class _StoreLostError(OSError):
    """The store could not be opened, was closed, or does not answer."""


_Jobs: TypeAlias = "SimpleQueue[tuple[Callable[[], Any], Done] | None]"


class _StoreThread:
    """The thread of all calls of one store.

    It is not an executor's, which refuses work once the interpreter ends: a program may
    shut down from `atexit`.  So that no thread must start then, it lives until `end`.
    If a job does not end, another thread does the next ones.

    Attributes:
        left_behind: how many jobs did not end.
    """

    def __init__(self, name: str) -> None:
        self.left_behind = 0
        self._name = name
        self._renew()

    def _renew(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs,), name=self._name, daemon=True
        )

    async def run(self, limit_s: float, job: Callable[[], T]) -> T:
        """Run a job after those that came before; _StoreLostError: it does not end."""
        loop, jobs = asyncio.get_running_loop(), self._jobs
        ended: asyncio.Future[T] = loop.create_future()
        finish = outcome_to(ended)

        def report(result: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, result, error)

        if self._thread.ident is None:
            self._thread.start()
        jobs.put((job, report))
        try:
            await asyncio.wait([ended], timeout=limit_s + _OVER_S)
            if ended.done():
                return ended.result()
        finally:
            ended.cancel()
        if self._jobs is jobs:
            self.left_behind += 1
            self.end()  # should it go on one day
            self._renew()
        raise _StoreLostError("no answer in time: the process that serves it may hang")

    def end(self) -> None:
        """Let the thread end after the jobs that it has."""
        self._jobs.put(None)


def _serve(jobs: _Jobs) -> None:
    while (work := jobs.get()) is not None:
        job, report = work
        try:
            report(job(), None)
        except BaseException as error:  # noqa: BLE001  (raised by `run`)
            report(None, error)
        del work, job, report  # they hold the store


class StoreRendezvous:
    """A meeting at a torch store.

    One word ends the wait of all: that all workers are there, from the last to arrive;
    which ranks are missing, from the first whose time is up; or that a group runs
    already, from the first that has found a member of it.

    Attributes:
        run: the name of the run; empty if it has none, so that no offers are made.
        missing: ranks that have not come, as rank 0 saw last; others do not look.
    """

    def __init__(
        self, place: StorePlace, rank: int, world_size: int, *, run: str = ""
    ) -> None:
        """Prepare to meet.

        Args:
            run: a name that workers of other runs do not have; see `offers`.
        """
        self._place = place
        self.rank = rank
        self.world_size = world_size
        self.run = run
        self._board = OfferBoard(PREFIX, run, rank) if run else None
        self._end_s: float | None = None
        self._store: Store | None = None
        self._visited: Store | None = None
        self.missing: tuple[int, ...] | None = None
        self._readers = 0  # how many workers read the store to the end
        self._given_up = threading.Event()
        self._is_second = threading.Event()
        self._thread = _StoreThread(f"asyncrpc-rendezvous-{rank}")

    @waits(lambda at: wait_at_start(at["self"].missing, at["self"].world_size))
    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Publish the record and wait for the word.

        If the word was given before, return a `RunningGroup`; if there is an offer,
        return that.  If a store at an address is lost meanwhile, look for it again.  A
        further call goes on waiting until the time of the first call is over.
        """
        if self._end_s is None:
            self._end_s = _now_s() + timeout_s
        end_s = self._end_s
        try:
            while True:
                try:
                    return await self._join_once(member, end_s, timeout_s)
                except _StoreLostError as error:
                    short = shortage_of(error)
                    if short and not self._place.may_come_back:
                        problem = (
                            f"the store for the rendezvous cannot be used: {short}"
                        )
                        raise RendezvousTimeoutError(problem, missing=()) from error
                    if not self._place.may_come_back or _now_s() >= end_s:
                        raise self._place.lost(timeout_s, str(error)) from error
                    await asyncio.sleep(KNOCK_S)
        except asyncio.CancelledError:
            self._given_up.set()
            raise

    async def _join_once(
        self, member: Member, end_s: float, timeout_s: float
    ) -> Sequence[Member]:
        while True:
            open_store = await self._place.find(end_s, timeout_s)
            left_s = max(0.0, end_s - _now_s())
            opener = partial(open_store, min(OPEN_S, left_s))
            async with self._looking_for_others():
                store = await self._in_thread(
                    min(self._patience_s, left_s), _opened, opener
                )
                members = await self._in_thread(
                    left_s + OPEN_S, self._join, store, member, end_s, timeout_s
                )
            if members is not None:
                return members
            # Workers that came here meanwhile lose the store, and look for it again.
            self._store = None
            self._is_second.clear()
            assert isinstance(self._place, TcpPlace)
            self._place.give_way()

    @asynccontextmanager
    async def _looking_for_others(self) -> AsyncIterator[None]:
        """Find out, while the block waits, whether to give up this process's store."""
        place = self._place
        if not isinstance(place, TcpPlace) or not place.is_host:
            yield
            return

        async def look() -> None:
            await asyncio.sleep(_OTHERS_S)  # most groups have met before
            while not await place.is_second():  # noqa: ASYNC110  (nothing tells)
                await asyncio.sleep(_OTHERS_S)
            self._is_second.set()

        looking = asyncio.get_running_loop().create_task(look())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])

    async def claim(self, member: Member) -> bool:
        """Give the word that a group runs; return whether the word now says so."""
        try:
            return await self._in_thread(OPEN_S, self._claim, member)
        except (RuntimeError, OSError):  # the store is lost: look for it again
            return False

    def refuse(self, offered: Sequence[Member]) -> None:
        """Take note that the members of the last offer cannot be reached."""
        assert self._board is not None
        self._board.refuse()

    async def look(self, limit_s: float) -> Finding:
        """Return what workers have left at the store that is there now."""
        open_store = await self._place.visit(limit_s)
        opener = partial(open_store, OPEN_S)
        self._visited = await self._in_thread(self._patience_s, _opened, opener)
        return await self._in_thread(OPEN_S, self._look, self._visited)

    async def offer(self, members: Sequence[Member]) -> bool:
        """Leave an offer at the store that `look` has opened."""
        store, board = self._visited, self._board
        assert board is not None
        try:
            if store is not None:  # else this worker leaves
                await self._in_thread(OPEN_S, board.write, store, members)
        except (RuntimeError, OSError):
            return False
        return store is not None

    async def leave(self, timeout_s: float) -> None:
        """Wait until all workers have read the store, then let go of it."""
        limit_s = timeout_s if self._place.is_host else _LAST_WORD_S
        try:
            with contextlib.suppress(_StoreLostError):
                await self._in_thread(limit_s, self._await_readers, timeout_s)
        finally:
            self._store = self._visited = None
            self._place.close()
            self._thread.end()

    async def _in_thread(
        self, limit_s: float, function: Callable[..., T], *args: Any
    ) -> T:
        return await self._thread.run(limit_s, partial(function, *args))

    @property
    def _patience_s(self) -> float:
        """How long a store may take to open: ever longer, so that few threads stay."""
        return OPEN_S * 2.0**self._thread.left_behind

    def _join(
        self,
        base: Store,
        member: Member,
        end_s: float,
        timeout_s: float,
    ) -> Sequence[Member] | None:
        keys = [f"{PREFIX}/member/{rank}" for rank in range(self.world_size)]
        try:
            if self._board is not None:
                self._board.arrive(base, member)
            outcome = self._come(base, member, keys, end_s)
            if not isinstance(outcome, list):
                return outcome
            store, missing = self._store, outcome
            assert store is not None
            absent = set(missing)
            present_keys = [key for rank, key in enumerate(keys) if rank not in absent]
            members = [
                Member.decode(packed) for packed in _get_all(store, present_keys)
            ]
            store.add(f"{PREFIX}/read", 1)
        except (RuntimeError, OSError) as error:  # what torch raises of a lost store
            raise _StoreLostError(_first_line(error)) from error
        self._readers = self.world_size - len(missing)
        if missing:
            raise missing_error(missing, self.world_size, timeout_s, members)
        return members

    def _come(
        self, base: Store, member: Member, keys: list[str], end_s: float
    ) -> list[int] | RunningGroup | None:
        """Meet in the present round, and in the next ones if need be."""
        missing: list[int] | OfferedGroup | None = None
        while missing is None and not self._is_second.is_set():
            store = self._store = self._round_in(base)
            if self._has_met(store, member):  # while it looked at an offer
                return []
            offered = self._read_offer(base)
            if offered is not None:
                return offered
            if self._is_running(store, member):
                return RunningGroup(map(Member.decode, _get_all(store, keys)))
            self._publish(store, member, keys)
            missing = self._await_word(base, store, member, end_s)
        return missing

    async def publish(self, member: Member) -> None:
        """Replace the published record of the name's former life.

        A store that has gone meanwhile is not an error: it is not needed any more.
        """
        store = self._store
        with contextlib.suppress(DistNetworkError, _StoreLostError):
            if store is not None:
                record = f"{PREFIX}/member/{self.rank}", member.encode()
                await self._in_thread(OPEN_S, store.set, *record)

    def _round_in(self, base: Store) -> Store:
        """Return the part of a store in which workers meet now.

        If a round found a running group, and its members have all gone before they
        admitted the workers of the round, these meet again in the next round.
        """
        apart = self._place.apart(base)
        if self._board is None:
            return apart
        for turn in itertools.count():
            store = PrefixStore(f"round{turn}", apart) if turn else apart
            if not store.check([_WORD]) or store.get(_WORD).decode() != _RUNNING:
                return store
        raise AssertionError  # each turn needs a word that was given

    def _read_offer(self, base: Store) -> OfferedGroup | None:
        return None if self._board is None else self._board.read(base)

    def _claim(self, member: Member) -> bool:
        store = self._store
        assert store is not None
        word = store.compare_set(_WORD, "", _RUNNING).decode()
        # All have met here before; this life was not there, but a former one.
        return word == _RUNNING or (
            word == _ALL and self._former(store) != member.incarnation
        )

    def _former(self, store: Store) -> int:
        packed = store.get(f"{PREFIX}/member/{self.rank}")
        return Member.decode(packed).incarnation

    def _look(self, store: Store) -> Finding:
        assert self._board is not None
        try:
            return self._board.look(store)
        except (RuntimeError, ValueError) as error:  # what torch raises of a lost store
            raise _StoreLostError(_first_line(error)) from error

    def _has_met(self, store: Store, member: Member) -> bool:
        """Return whether all have come, this life among them."""
        has_come = store.check([_WORD]) and store.get(_WORD).decode() == _ALL
        return has_come and self._former(store) == member.incarnation

    def _is_running(self, store: Store, member: Member) -> bool:
        """Return whether all have met here before, this name among them.

        Then its former life has ended, and this one joins the others; if it has not,
        they will say so.
        """
        if not store.check([_WORD]) or store.get(_WORD).decode() != _ALL:
            return False
        former = Member.decode(store.get(f"{PREFIX}/member/{self.rank}"))
        if former.name == member.name:
            return True
        raise UsageError(
            f"rank {self.rank} of this group is worker {former.name!r}, not "
            f"{member.name!r}; a new worker joins with "
            'rendezvous="join://host:port" of any member'
        )

    def _publish(self, store: Store, member: Member, keys: list[str]) -> None:
        """Leave the record; it may be there already, if the store was lost since."""
        own = str(member.incarnation)
        name, rank = f"{PREFIX}/name/{member.name}", f"{PREFIX}/rank/{self.rank}"
        holder = store.compare_set(name, "", own).decode()
        if holder != own:
            # The same name at the same rank is a former life, which a launcher has
            # started again before all have met.  Were it alive, it would notice.
            if not store.check([rank]) or store.get(rank).decode() != holder:
                raise _not_unique(member.name)
            store.set(name, own)
            store.set(rank, own)
        elif store.compare_set(rank, "", own) != own.encode():
            raise UsageError(f"two workers of this group have rank {self.rank}")
        store.set(f"{PREFIX}/member/{self.rank}", member.encode())  # type: ignore[arg-type]
        # A worker that published twice has counted twice; so the last ones check the
        # keys.
        if store.add(f"{PREFIX}/joined", 1) >= self.world_size and store.check(keys):
            store.compare_set(_WORD, "", _ALL)

    def _await_word(
        self, base: Store, store: Store, member: Member, end_s: float
    ) -> list[int] | OfferedGroup | None:
        """Return the missing ranks, as all workers are told.

        The store's own wait would print a warning each time that it is interrupted.
        """
        pause_s = _POLL_S / 10
        for polls in itertools.count(1):
            left_s = end_s - _now_s()
            if left_s <= 0 or self._given_up.is_set():
                break
            if self._is_second.is_set():
                return None
            has_word = store.check([_WORD])
            if has_word or polls % _POLLS_PER_LOOK == 0:
                self._check_place(store, member)
            if has_word:
                return _missing_in(store.get(_WORD))
            if self.rank == 0 and polls % _POLLS_PER_ROLL == _FIRST_ROLL:
                self.missing = tuple(self._absent_from(store))
            if polls % _POLLS_PER_OFFER == 0:
                offered = self._read_offer(base)
                if offered is not None:
                    return offered
            self._given_up.wait(min(left_s, pause_s))
            pause_s = min(1.5 * pause_s, _POLL_MAX_S)
        return self._give_word(store)

    def _check_place(self, store: Store, member: Member) -> None:
        """Raise UsageError if another process has come under this name and rank."""
        holder = store.get(f"{PREFIX}/rank/{self.rank}").decode()
        if holder != str(member.incarnation):
            raise _not_unique(member.name)

    def _give_word(self, store: Store) -> list[int] | None:
        """Say which ranks are missing, unless the word has been given just now."""
        word = ",".join(map(str, self._absent_from(store))) or _ALL
        return _missing_in(store.compare_set(_WORD, "", word))

    def _absent_from(self, store: Store) -> list[int]:
        ranks = range(self.world_size)
        return [rank for rank in ranks if not store.check([f"{PREFIX}/member/{rank}"])]

    def _await_readers(self, timeout_s: float) -> None:
        """Keep a store that this worker hosts until all have read it."""
        store = self._store
        if store is None or not self._place.is_host:
            return
        if self._readers < self.world_size:  # it failed, and all were told at once
            timeout_s = min(timeout_s, _LAST_WORD_S)
        end_s = _now_s() + timeout_s
        poll = threading.Event()  # never set: a way to wait
        while store.add(f"{PREFIX}/read", 0) < self._readers and _now_s() < end_s:
            poll.wait(_POLL_S)


def _opened(open_store: Callable[[], Store]) -> Store:
    try:
        return open_store()
    except (RuntimeError, OSError) as error:  # what torch raises of a lost store
        raise _StoreLostError(_first_line(error)) from error


def _not_unique(name: str) -> UsageError:
    return UsageError(
        f"the name {name!r} is not unique: another worker of this group has it"
    )


def _missing_in(word: bytes) -> list[int] | None:
    text = word.decode()
    if text == _RUNNING:
        return None
    return [] if text == _ALL else [int(rank) for rank in text.split(",")]


def _first_line(error: BaseException) -> str:
    """Return what a store says, without the stack of its library."""
    return str(error).partition("\n")[0]


def _get_all(store: Store, keys: list[str]) -> list[bytes]:
    try:
        values: list[bytes] = store.multi_get(keys)
    except (RuntimeError, NotImplementedError):  # a store without it
        values = [store.get(key) for key in keys]
    return values
