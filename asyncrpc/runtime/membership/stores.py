"""The rendezvous at a torch store: a file, or the process that listens at a port.

The work at the store is linear in the number of workers: each adds its record once, and
reads all once.  Store calls block, so they run in a thread of their own, never on the
loop; none lasts long, so that a worker that is ended while it waits is gone soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    FileStore,
    PrefixStore,
    TCPStore,
)

from asyncrpc.clock import Clock
from asyncrpc.errors import RendezvousTimeoutError, UsageError
from asyncrpc.runtime.members import Member, RunningGroup, missing_error
from asyncrpc.transport.endpoints import reason_of
from asyncrpc.transport.meeting import Found, MeetingAddress

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
PREFIX: Final = "asyncrpc/rpc"
_WORD: Final = f"{PREFIX}/word"
_ALL: Final = "all"
_POLL_S: Final = 0.02
_KNOCK_S: Final = 0.1  # between attempts to find the host of a store
# So long rank 0 may come later than another process at the address, and host the store.
GRACE_S: Final = 2.0
_OPEN_S: Final = 5.0  # for torch to connect: its thread cannot be called off
_POLLS_PER_LOOK: Final = 10  # at whether another process has taken this one's place
_POLL_MAX_S: Final = 0.1  # ten questions a second from each worker that waits long
# Workers that came may take so long to learn that others did not.
_LAST_WORD_S: Final = 1.0

_now_s: Final = Clock().now_s


class Hosting(enum.Enum):
    """Whether a process hosts the store of its group."""

    NEVER = "another process is known to: the launcher, or rank 0 beside this one"
    AT_ONCE = "if the address is one of this host's; this is rank 0"
    LATE = "likewise, if nobody listens there for a while"


class StorePlace(Protocol):
    """Where a store is.

    Attributes:
        is_host: whether this worker keeps the store alive until all have read it.
        may_come_back: whether a store that is lost can be found again.
    """

    is_host: bool
    may_come_back: bool

    async def find(self, end_s: float, timeout_s: float) -> Callable[[float], Store]:
        """Wait for the store; return what opens it within so many seconds."""

    def lost(self, timeout_s: float, why: str) -> RendezvousTimeoutError:
        """Return the error for a store that was lost before all had met."""

    def close(self) -> None:
        """Let go of the store."""


class GivenStore:
    """A store that can be opened at once: in a file, or one that the program has."""

    may_come_back = False

    def __init__(self, open_store: Callable[[], Store], *, is_host: bool) -> None:
        """Take what opens it; `is_host`: see `StorePlace`."""
        self.is_host = is_host
        self._open_store = open_store

    @classmethod
    def in_file(cls, path: str, *, is_host: bool) -> GivenStore:
        """Return the store in a file."""
        return cls(lambda: FileStore(path), is_host=is_host)

    async def find(self, end_s: float, timeout_s: float) -> Callable[[float], Store]:
        """Return what opens it."""
        return lambda _timeout_s: self._open_store()

    def lost(self, timeout_s: float, why: str) -> RendezvousTimeoutError:
        """Return the error for its loss."""
        return RendezvousTimeoutError(
            f"the store for the rendezvous was lost ({why}); the process that serves "
            "it has ended",
            missing=(),
        )

    def close(self) -> None:
        """Do nothing: it is not this worker's."""


class TcpPlace:
    """A store at a TCP address; whoever is there and gets the port hosts it.

    Rank 0 need not be at the address: srun and mpirun may have put it elsewhere.  But
    where it is there, it is the host: torch's own process group expects that.

    Attributes:
        is_host: whether this process hosts the store.
    """

    may_come_back = True

    def __init__(
        self, address: MeetingAddress, hosting: Hosting, *, attempt: str = "0"
    ) -> None:
        """Describe the place.

        Args:
            address: where it is.
            hosting: whether this process may host it.
            attempt: which of several groups that meet there, one after the other, this
                is; the first one is "0".
        """
        self.address = address
        self.is_host = False
        self._hosting = hosting
        self._attempt = attempt
        self._offered: Store | None = None

    async def find(self, end_s: float, timeout_s: float) -> Callable[[float], Store]:
        """Wait until somebody listens; return what opens the store.

        torch waits for that too, but in a thread that cannot be called off.

        Raises:
            RendezvousTimeoutError: nobody does; it says why.

        Cancellation:
            Nothing is left of it.
        """
        begun_s, problem = _now_s(), ""
        while (left_s := end_s - _now_s()) > 0:
            try:
                found = await self.address.look(left_s)
                if self._may_host(found, _now_s() - begun_s) and self._host(found):
                    return self._open_own
                listening = await self.address.knock(found.endpoints, left_s)
            except OSError as error:  # TimeoutError is one
                # What the end of the time cuts short says less than what was before.
                is_cut = _now_s() >= end_s
                problem = problem if problem and is_cut else reason_of(error)
                await asyncio.sleep(max(0.0, min(_KNOCK_S, end_s - _now_s())))
            else:
                return partial(self._open, listening.host)
        raise self.lost(timeout_s, problem)

    def lost(self, timeout_s: float, why: str) -> RendezvousTimeoutError:
        """Return the error for a store that cannot be found, or found again."""
        return RendezvousTimeoutError(
            f"the meeting place {self.address} cannot be reached in {timeout_s:g} s: "
            f"{why or 'no time was left'}; missing: a worker at this address, such as "
            "rank 0, or the launcher that serves the store there",
            missing=(str(self.address),),
        )

    def _may_host(self, found: Found, waited_s: float) -> bool:
        if self._hosting is Hosting.NEVER or self._offered is not None:
            return False
        if self._hosting is Hosting.AT_ONCE:
            # Nobody can be told from a name that leads here through another address,
            # such as that of a service of Kubernetes; so the port is offered here, too.
            return bool(found.local) or waited_s >= GRACE_S
        return found.is_here and waited_s >= GRACE_S

    def _host(self, found: Found) -> bool:
        """Try to host the store; return whether the address leads to it."""
        descriptor = self.address.bind()
        if descriptor is None:  # another process of this host does
            return False
        host = found.local[0].host if found.local else "127.0.0.1"
        self._offered = TCPStore(
            host,
            self.address.port,
            is_master=True,
            timeout=timedelta(seconds=_OPEN_S),
            wait_for_workers=False,
            multi_tenant=True,  # torch's process group of this process may share it
            master_listen_fd=descriptor,  # from here on the store's to close
        )
        self.is_host = True
        return bool(found.local)

    def _open_own(self, _timeout_s: float) -> Store:
        assert self._offered is not None
        return self._apart(self._offered)

    def _open(self, host: str, timeout_s: float) -> Store:
        store = TCPStore(
            host,
            self.address.port,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
        return self._apart(store)

    def _apart(self, store: Store) -> Store:
        if self._attempt == "0":
            return store
        return PrefixStore(f"attempt{self._attempt}", store)

    def close(self) -> None:
        """Let go of the store that is hosted here."""
        self._offered = None


class _StoreLostError(Exception):
    """The store could not be opened, or was closed."""


class StoreRendezvous:
    """A meeting at a torch store.

    One word ends the wait of all: that everyone is there, from the last to arrive, or
    who is missing, from the first whose time is up.
    """

    def __init__(self, place: StorePlace, rank: int, world_size: int) -> None:
        """Prepare to meet.

        Args:
            place: where the store is.
            rank: of this worker.
            world_size: how many workers there are.
        """
        self._place = place
        self.rank = rank
        self.world_size = world_size
        self._store: Store | None = None
        self._readers = 0  # who reads the store to the end
        self._given_up = threading.Event()
        self._thread = ThreadPoolExecutor(1, f"asyncrpc-rendezvous-{rank}")

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Publish the record and wait for the word.

        If the word was given before, return a `RunningGroup`.  A store at an address
        that is lost meanwhile is looked for again.

        Raises:
            RendezvousTimeoutError: some are missing, or the store is; it says which.
            UsageError: the name or the rank is taken.

        Cancellation:
            The thread that waits is called off, and `leave` finds it free soon.  The
            record stays published.
        """
        end_s = _now_s() + timeout_s
        try:
            while True:
                try:
                    return await self._join_once(member, end_s, timeout_s)
                except _StoreLostError as error:
                    if not self._place.may_come_back or _now_s() >= end_s:
                        raise self._place.lost(timeout_s, str(error)) from error
                    await asyncio.sleep(_KNOCK_S)
        except asyncio.CancelledError:
            self._given_up.set()
            raise

    async def _join_once(
        self, member: Member, end_s: float, timeout_s: float
    ) -> Sequence[Member]:
        open_store = await self._place.find(end_s, timeout_s)
        opener = partial(open_store, max(0.0, min(_OPEN_S, end_s - _now_s())))
        return await self._in_thread(self._join, opener, member, end_s, timeout_s)

    async def leave(self, timeout_s: float) -> None:
        """Wait until everyone has read, then let go of the store."""
        try:
            await self._in_thread(self._await_readers, timeout_s)
        finally:
            self._store = None
            self._place.close()
            self._thread.shutdown(wait=False)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *args)

    def _join(
        self,
        open_store: Callable[[], Store],
        member: Member,
        end_s: float,
        timeout_s: float,
    ) -> Sequence[Member]:
        keys = [f"{PREFIX}/member/{rank}" for rank in range(self.world_size)]
        try:
            store = self._store = open_store()
            if self._is_running(store, member):
                return RunningGroup(map(Member.decode, _get_all(store, keys)))
            self._publish(store, member, keys)
            missing = self._await_word(store, member, end_s)
            members = [] if missing else _get_all(store, keys)
            store.add(f"{PREFIX}/read", 1)
        except (RuntimeError, OSError) as error:  # what torch raises of a lost store
            raise _StoreLostError(_first_line(error)) from error
        self._readers = self.world_size - len(missing)
        if missing:
            raise missing_error(missing, self.world_size, timeout_s)
        return [Member.decode(packed) for packed in members]

    async def publish(self, member: Member) -> None:
        """Publish the record in place of that of the name's former life.

        It is no failure if the store has gone meanwhile: it is not needed any more.

        Cancellation:
            The record may be there or not.
        """
        await self._in_thread(self._republish, member)

    def _republish(self, member: Member) -> None:
        store = self._store
        with contextlib.suppress(DistNetworkError):
            if store is not None:
                store.set(f"{PREFIX}/member/{self.rank}", member.encode())  # type: ignore[arg-type]

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
            f"rank {self.rank} of the group that met at this store is worker "
            f"{former.name!r}, not {member.name!r}; a worker that is new joins by "
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
        # Who published twice has counted twice; so the last ones look, too.
        if store.add(f"{PREFIX}/joined", 1) >= self.world_size and store.check(keys):
            store.compare_set(_WORD, "", _ALL)

    def _await_word(self, store: Store, member: Member, end_s: float) -> list[int]:
        """Return the missing ranks, as all workers are told.

        The store's own wait would print a warning each time it is called off.
        """
        pause_s = _POLL_S / 10
        for polls in itertools.count(1):
            left_s = end_s - _now_s()
            if left_s <= 0 or self._given_up.is_set():
                break
            has_word = store.check([_WORD])
            if has_word or polls % _POLLS_PER_LOOK == 0:
                self._check_place(store, member)
            if has_word:
                return _missing_in(store.get(_WORD))
            self._given_up.wait(min(left_s, pause_s))
            pause_s = min(1.5 * pause_s, _POLL_MAX_S)
        return self._give_word(store)

    def _check_place(self, store: Store, member: Member) -> None:
        """Raise if another process has come under this name and rank."""
        holder = store.get(f"{PREFIX}/rank/{self.rank}").decode()
        if holder != str(member.incarnation):
            raise _not_unique(member.name)

    def _give_word(self, store: Store) -> list[int]:
        """Say who is missing, unless the word has been given just now."""
        absent = (
            str(rank)
            for rank in range(self.world_size)
            if not store.check([f"{PREFIX}/member/{rank}"])
        )
        word = ",".join(absent) or _ALL
        return _missing_in(store.compare_set(_WORD, "", word))

    def _await_readers(self, timeout_s: float) -> None:
        """Keep a store alive that this worker hosts until all have read it."""
        store = self._store
        if store is None or not self._place.is_host:
            return
        if self._readers < self.world_size:  # it failed, and all were told at once
            timeout_s = min(timeout_s, _LAST_WORD_S)
        end_s = _now_s() + timeout_s
        poll = threading.Event()  # never set: a way to wait
        while store.add(f"{PREFIX}/read", 0) < self._readers and _now_s() < end_s:
            poll.wait(_POLL_S)


def _not_unique(name: str) -> UsageError:
    return UsageError(
        f"the name {name!r} is not unique: another worker of this group has it"
    )


def _missing_in(word: bytes) -> list[int]:
    text = word.decode()
    return [] if text == _ALL else [int(rank) for rank in text.split(",")]


def _first_line(error: BaseException) -> str:
    """Return what a store says, without the stack of its library."""
    return str(error).partition("\n")[0]


def _get_all(store: Store, keys: list[str]) -> list[bytes]:
    try:
        found: list[bytes] = store.multi_get(keys)
    except (RuntimeError, NotImplementedError):  # a store without it
        found = [store.get(key) for key in keys]
    return found
