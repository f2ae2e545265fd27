"""What services, and the parts below them, see of what is made above them.

A part names the class that it uses, where the order of the packages allows it.  What is
above it has one protocol for each package that needs more of it: a link has `PeerLink`
here, `CallLink` for the parts of calls, and `PayloadLink` for those of payloads.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from asyncrpc.core.arguments import check_kind, wrong
from asyncrpc.core.devices.maps import DeviceMap
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.loop.threads import Done, Job
from asyncrpc.core.services.messages import Notice, Request

T = TypeVar("T")


class Scheduler(Protocol):
    """The event loop of a worker, and the tasks that end with the worker."""

    loop: asyncio.AbstractEventLoop

    def start_task(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        """Run a coroutine as a task that ends with the worker."""


class Pool(Protocol):
    """Threads that run jobs."""

    def submit(self, job: Job, done: Done) -> None:
        """Run a job, then tell its outcome on the loop."""


class PeerLink(Protocol):
    """The way to one incarnation of a peer, as services use it."""

    @property
    def peer(self) -> WorkerId:
        """Return the worker at the other end."""

    @property
    def is_guest(self) -> bool:
        """Return whether a token has let the worker in."""

    @property
    def is_lost(self) -> bool:
        """Return whether the connection has ended for good."""

    def check_room(self, nbytes: int, /) -> None:
        """Refuse to keep so many more bytes for the worker, unless there is room.

        Raises:
            OverloadedError: there is none; see `LimitOptions.peer_bytes_max`.
        """

    def tell(self, notice: Notice, *, at_once: bool = False) -> None:
        """Send a message that is not answered.

        Args:
            notice: the message.
            at_once: it goes now, not with the next one or in the loop's next turn.
        """

    def ask(
        self,
        request: Request[Any],
        *,
        deadline: Deadline | None = None,
        device_map: DeviceMap | None = None,
    ) -> asyncio.Future[Any]:
        """Send a request; the future holds its answer as it travels.

        See `ask`, which returns the answer itself.
        """


class Links(Protocol):
    """How a worker gets a link that may not be there yet."""

    def link_to(self, name: str, /) -> Awaitable[PeerLink]:
        """Return the link to a worker, connecting if need be."""


class ServiceHost(Scheduler, Protocol):
    """What a worker offers to its services.

    Attributes:
        queues: of requests that come to this worker's process, by name: each returns
            its figures, from any thread; metrics show them.
    """

    queues: dict[str, Callable[[], Mapping[str, float]]]

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def rank(self) -> int:
        """Its rank in the group; -1: it has none."""

    @property
    def id(self) -> WorkerId:
        """Its name, and the number of this life of it."""

    def check_on_loop(self, used: str) -> None:
        """Raise unless the worker runs, and its event loop runs here.

        Args:
            used: the name of the called function, for the error.

        Raises:
            NotStartedError: the worker does not run.
            UsageError: another event loop runs here, or none.
        """

    def link_to(self, to: str) -> Awaitable[PeerLink]:
        """Return the link to a worker, connecting if need be.

        Raises:
            UnknownWorkerError: no worker has this name.
            WorkerLostError: the worker cannot be reached.
        """

    def run_in_thread(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function in a thread of the worker; called on the loop.

        Raises:
            RejectedError: the worker ends.
        """


async def ask(
    link: PeerLink,
    request: Request[T],
    *,
    deadline: Deadline | None = None,
    device_map: DeviceMap | None = None,
) -> T:
    """Send a request to a service of a peer, and return its answer.

    Args:
        link: to the peer.
        request: a message of the service.
        deadline: of the answer; None: none.
        device_map: where tensors of the request go, by where they are.

    Raises:
        UsageError: an argument is of another kind.
        MalformedError: the content of the answer is invalid.
        NotStartedError: this worker has been shut down.
        AsyncRpcError: no answer came, or the answer is this error.

    Cancellation:
        The peer is told to stop.
    """
    if not isinstance(request, Request):
        raise wrong("request", "a message of class Request", request)
    try:
        peer = link.peer.name
    except Exception:  # noqa: BLE001  (an object of the program)
        raise wrong("link", "a link to a worker, as link_to returns", link) from None
    if deadline is not None:
        check_kind("deadline", deadline, Deadline, "a Deadline or None")
    if device_map is not None:
        check_kind("device_map", device_map, DeviceMap, "a DeviceMap or None")
    answer = link.ask(request, deadline=deadline, device_map=device_map)
    return request.read_answer(peer, await answer)
