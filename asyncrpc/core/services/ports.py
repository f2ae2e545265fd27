"""The worker and its links, as services and the parts below them see them.

`core.parts` and `core.links` are above, so contracts stand for them here: one for each
object and layer.  Of a worker these are `Scheduler`, and on it `ServiceHost` and
`calls.ports.CallHost`; what is above the parts takes `Parts` itself.  A part that needs
one function takes the function, such as a `LinkTo`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from asyncrpc.core.arguments import check_kind, wrong
from asyncrpc.core.devices.maps import DeviceMap
from asyncrpc.core.devices.staging import Devices
from asyncrpc.core.ids import Incarnation, WorkerId, WorkerInfo
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.loop.threads import ThreadPool
from asyncrpc.core.options import Options
from asyncrpc.core.services.schema import Notice, Request
from asyncrpc.core.trace.recorder import FlightRecorder

if TYPE_CHECKING:
    from asyncrpc.core.services.extensions import Service

T = TypeVar("T")
S = TypeVar("S")


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

    @property
    def is_draining(self) -> bool:
        """Return whether the worker has said that it takes no further calls."""

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


# Returns the open link to one life of a worker; None without one.
LinkOf: TypeAlias = Callable[[Incarnation], PeerLink | None]
# Returns the link to a worker, by name, connecting if need be.
LinkTo: TypeAlias = Callable[[str], Awaitable[PeerLink]]


class ServiceHost(Scheduler, Protocol):
    """What a worker offers to its services.

    Attributes:
        options: of the worker, completed from its environment.
        recorder: keeps the last events of the worker; see `asyncrpc.trace`.
        queues: of requests that come to this worker's process, by name: each returns
            its figures, from any thread; metrics show them.
        devices: copies tensors to and from devices.
        pool: threads for functions.
        random_bytes: returns so many unpredictable bytes.
        note_of: returns the note beside the answer to a call, from what the called
            function has said of it; None: no answer has a note.
    """

    options: Options
    recorder: FlightRecorder
    queues: dict[str, Callable[[], Mapping[str, float]]]
    devices: Devices
    pool: ThreadPool
    random_bytes: Callable[[int], bytes]
    note_of: Callable[[Any], Any] | None

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def rank(self) -> int:
        """Its rank in the group; -1: it has none."""

    @property
    def id(self) -> WorkerId:
        """Its name, and the number of this life of it."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where other workers can reach it."""

    @property
    def listening(self) -> tuple[str, ...]:
        """Where it listens, also if its addresses for others are not these."""

    @property
    def active(self) -> int:
        """Number of calls that it serves now."""

    @property
    def is_draining(self) -> bool:
        """Whether it shuts down, and connects to no other worker."""

    @property
    def is_ending(self) -> bool:
        """Whether it has asked for the end of the group."""

    @property
    def known_members(self) -> list[WorkerInfo]:
        """The members that it knows, itself included."""

    def check_on_loop(self, used: str) -> None:
        """Raise unless the worker runs, and its event loop runs here.

        Args:
            used: the name of the called function, for the error.

        Raises:
            NotStartedError: the worker does not run.
            UsageError: another event loop runs here, or none.
        """

    def check_loop(self, used: str) -> None:
        """Raise unless its event loop runs here; the worker may have ended.

        Args:
            used: the name of the called function, for the error.

        Raises:
            UsageError: another event loop runs here, or none.
        """

    def add_service(self, service: Service) -> None:
        """Take the messages of a service from now on; earlier messages were refused.

        A service that peers may use at once is added before the start, see
        `add_service`.
        """

    def find_service(self, kind: type[S]) -> S | None:
        """Return the service of a class; None if the worker has none."""

    def link_to(self, to: str) -> Awaitable[PeerLink]:
        """Return the link to a worker, connecting if need be.

        Raises:
            UnknownWorkerError: no worker has this name.
            WorkerLostError: the worker cannot be reached.
        """

    def expect(self, name: str) -> asyncio.Future[None]:
        """Let calls to a worker wait until the returned future ends.

        Until then nobody needs to know the worker; if the future fails, the calls raise
        its error.
        """

    def open_link_to(self, to: str) -> PeerLink | None:
        """Return the open link to a worker; None if there is none yet.

        Raises:
            UnknownWorkerError: no worker has this name.
        """

    def incarnation_of(self, to: str) -> Incarnation | None:
        """Return the incarnation of a worker; None if no worker of the name is known.

        Args:
            to: its name.
        """

    def find_member(self, name: str, timeout_s: float) -> Awaitable[None]:
        """Ask the other members about a worker that this one does not know.

        Args:
            name: of the worker.
            timeout_s: seconds to wait for it.

        Raises:
            UnknownWorkerError: no member knows it in time.
        """

    def wait_idle(self, *, but: int = 0) -> Awaitable[None]:
        """Wait until the worker serves no call.

        Args:
            but: so many calls may still run, such as the call that waits.
        """

    def run_in_thread(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function in a thread of the worker; called on the loop.

        Raises:
            RejectedError: the worker ends.
        """

    def run_on_host(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function that uses no device in a thread; called on the loop.

        It does not wait for a lock of devices.

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
    """Send a request to a service of a peer, and return its answer."""
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
