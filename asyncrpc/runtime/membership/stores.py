"""The rendezvous at a torch store: a file, or the process that listens at a port.

The work at the store is linear in the number of workers: each adds its record once, and
reads all once.  Store calls block, so they run in a thread of their own, never on the
loop; none lasts long, so that a worker that is ended while it waits is gone at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    FileStore,
    PrefixStore,
    TCPStore,
)

from asyncrpc.clock import Clock
from asyncrpc.errors import RendezvousTimeoutError, UsageError
from asyncrpc.runtime.members import Member, RunningGroup, missing_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
PREFIX: Final = "asyncrpc/rpc"
_WORD: Final = f"{PREFIX}/word"
_ALL: Final = "all"
_POLL_S: Final = 0.02
_KNOCK_S: Final = 0.1  # between attempts to find the host of a store
_POLL_MAX_S: Final = 0.1  # ten questions a second from each worker that waits long
# Workers that came may take so long to learn that others did not.
_LAST_WORD_S: Final = 1.0

_now_s: Final = Clock().now_s


class StoreRendezvous:
    """A meeting at a torch store.

    One word ends the wait of all: that everyone is there, from the last to arrive, or
    who is missing, from the first whose time is up.
    """

    def __init__(
        self,
        open_store: Callable[[float], Store],
        rank: int,
        world_size: int,
        *,
        address: tuple[str, int] | None = None,
    ) -> None:
        """Prepare to meet.

        Args:
            open_store: opens the store within so many seconds; runs in a thread.
            rank: of this worker.
            world_size: how many workers there are.
            address: where another process hosts the store, if one does.
        """
        self._open_store = open_store
        self._address = address
        self.rank = rank
        self.world_size = world_size
        self._store: Store | None = None
        self._readers = 0  # who reads the store to the end
        self._given_up = threading.Event()
        self._thread = ThreadPoolExecutor(1, f"asyncrpc-rendezvous-{rank}")

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Publish the record and wait for the word.

        If the word was given before, return a `RunningGroup`.

        Raises:
            RendezvousTimeoutError: some are missing, or the store is; it says which.
            UsageError: the name or the rank is taken.

        Cancellation:
            The thread that waits is called off, and `leave` finds it free soon.  The
            record stays published.
        """
        end_s = _now_s() + timeout_s
        try:
            await self._await_host(end_s, timeout_s)
            return await self._in_thread(self._join, member, end_s, timeout_s)
        except asyncio.CancelledError:
            self._given_up.set()
            raise

    async def leave(self, timeout_s: float) -> None:
        """Wait until everyone has read, then let go of the store."""
        try:
            await self._in_thread(self._await_readers, timeout_s)
        finally:
            self._store = None
            self._thread.shutdown(wait=False)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *args)

    def _join(self, member: Member, end_s: float, timeout_s: float) -> Sequence[Member]:
        try:
            store = self._store = self._open_store(timeout_s)
        except (RuntimeError, OSError) as error:
            raise _no_store(timeout_s, error) from error
        keys = [f"{PREFIX}/member/{rank}" for rank in range(self.world_size)]
        try:
            if self._is_running(store, member):
                return RunningGroup(map(Member.decode, _get_all(store, keys)))
            self._publish(store, member)
            missing = self._await_word(store, end_s)
            members = [] if missing else _get_all(store, keys)
            store.add(f"{PREFIX}/read", 1)
        except DistNetworkError as error:
            raise RendezvousTimeoutError(
                "the store for the rendezvous was closed while this worker waited "
                f"({_first_line(error)}); the worker of rank 0, or the launcher, ended",
                missing=(0,),
            ) from error
        self._readers = self.world_size - len(missing)
        if missing:
            raise missing_error(missing, self.world_size, timeout_s)
        return [Member.decode(packed) for packed in members]

    async def _await_host(self, end_s: float, timeout_s: float) -> None:
        """Wait until the store's host listens.

        torch waits for that too, but in a thread that cannot be called off.
        """
        loop = asyncio.get_running_loop()
        while self._address is not None:
            try:
                async with asyncio.timeout(max(0.0, end_s - _now_s())):
                    await asyncio.sleep(0)  # a time that is up counts before success
                    knock, _ = await loop.create_connection(
                        asyncio.Protocol, *self._address
                    )
            except OSError as error:  # TimeoutError is one
                if _now_s() >= end_s:
                    raise _no_store(timeout_s, error) from error
                await asyncio.sleep(_KNOCK_S)
            else:
                knock.abort()
                return

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

    def _publish(self, store: Store, member: Member) -> None:
        if store.add(f"{PREFIX}/name/{member.name}", 1) > 1:
            raise UsageError(
                f"the name {member.name!r} is not unique: another worker of this group "
                "has it"
            )
        if store.add(f"{PREFIX}/rank/{self.rank}", 1) > 1:
            raise UsageError(f"two workers of this group have rank {self.rank}")
        store.set(f"{PREFIX}/member/{self.rank}", member.encode())  # type: ignore[arg-type]
        if store.add(f"{PREFIX}/joined", 1) == self.world_size:
            store.compare_set(_WORD, "", _ALL)

    def _await_word(self, store: Store, end_s: float) -> list[int]:
        """Return the missing ranks, as all workers are told.

        The store's own wait would print a warning each time it is called off.
        """
        pause_s = _POLL_S / 10
        while (left_s := end_s - _now_s()) > 0 and not self._given_up.is_set():
            if store.check([_WORD]):
                return _missing_in(store.get(_WORD))
            self._given_up.wait(min(left_s, pause_s))
            pause_s = min(1.5 * pause_s, _POLL_MAX_S)
        return self._give_word(store)

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
        if store is None or self.rank != 0:
            return
        if self._readers < self.world_size:  # it failed, and all were told at once
            timeout_s = min(timeout_s, _LAST_WORD_S)
        end_s = _now_s() + timeout_s
        poll = threading.Event()  # never set: a way to wait
        while store.add(f"{PREFIX}/read", 0) < self._readers and _now_s() < end_s:
            poll.wait(_POLL_S)


def _missing_in(word: bytes) -> list[int]:
    text = word.decode()
    return [] if text == _ALL else [int(rank) for rank in text.split(",")]


def _no_store(timeout_s: float, error: Exception) -> RendezvousTimeoutError:
    return RendezvousTimeoutError(
        f"the store for the rendezvous cannot be reached in {timeout_s:g} s "
        f"({_first_line(error)}); is the worker of rank 0, or the launcher, running?",
        missing=(0,),
    )


def _first_line(error: BaseException) -> str:
    """Return what a store says, without the stack of its library."""
    return str(error).partition("\n")[0]


def _get_all(store: Store, keys: list[str]) -> list[bytes]:
    try:
        found: list[bytes] = store.multi_get(keys)
    except (RuntimeError, NotImplementedError):  # a store without it
        found = [store.get(key) for key in keys]
    return found


def file_opener(path: str) -> Callable[[float], Store]:
    """Return what opens the store in a file, within so many seconds."""
    return lambda _timeout_s: FileStore(path)


def tcp_opener(
    host: str, port: int, *, is_master: bool, attempt: str = "0"
) -> Callable[[float], Store]:
    """Return what opens the store at a port, or hosts it, within so many seconds.

    Args:
        host: where the store is.
        port: of it.
        is_master: whether this process is to host it.
        attempt: which of several groups that meet there, one after the other, this is;
            the first one is "0".
    """

    def open_store(timeout_s: float) -> Store:
        store = TCPStore(
            host,
            port,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
        return store if attempt == "0" else PrefixStore(f"attempt{attempt}", store)

    return open_store
