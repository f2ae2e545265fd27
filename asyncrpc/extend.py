"""What a part needs that stands on workers: services, messages, links, waits, traces.

A *service* is a part of a worker that the same parts of other workers send messages to.
It declares its messages, and takes them:

    @message("counter", "lease")
    class Lease(Request[int]):
        count: Count

    class Counter:
        name = "counter"

        def __init__(self, host: ServiceHost) -> None:
            self.routes = (answers(Lease, self._on_lease),)

    add_service(worker, Counter)  # before the worker starts, on every worker

`docs/how-to/build-a-service.md` builds one.  What stands on the core in asyncrpc itself
(collectives, serving, the tools) uses the public names of `asyncrpc` and these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from asyncrpc.core.arguments import check_callable, check_kind, wrong
from asyncrpc.core.devices.maps import DeviceMap
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.lifecycle import WorkerState
from asyncrpc.core.links.link import Link
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.loop.waits import WaitDescription, WaitKind, does, waits, works_for
from asyncrpc.core.services import ports
from asyncrpc.core.services.extensions import CallSpan, CallTracer, Service
from asyncrpc.core.services.ports import PeerLink, ServiceHost
from asyncrpc.core.services.router import Route, answers, takes
from asyncrpc.core.services.schema import (
    LOOKERS,
    MEMBERS,
    WORKERS,
    Count,
    EnumName,
    Integer,
    Notice,
    Number,
    RecordSchema,
    Request,
    Sender,
    Signed,
    Spread,
    message,
)
from asyncrpc.core.worker import Worker
from asyncrpc.errors import UsageError

__all__ = [  # noqa: RUF022  (in groups, as the API page shows them)
    # Services
    "Service",
    "ServiceHost",
    "add_service",
    "service_of",
    "host_of",
    # Their messages
    "message",
    "Notice",
    "Request",
    "Route",
    "answers",
    "takes",
    "ask",
    "PeerLink",
    "WorkerId",
    "Incarnation",
    "Deadline",
    # Who may send a message
    "Sender",
    "MEMBERS",
    "WORKERS",
    "LOOKERS",
    # The types of their fields
    "Count",
    "Signed",
    "Integer",
    "Number",
    "EnumName",
    "Spread",
    "RecordSchema",
    # What a function waits for, and does
    "waits",
    "works_for",
    "does",
    "WaitDescription",
    "WaitKind",
    # Traces of calls
    "CallTracer",
    "CallSpan",
    "trace_by",
    "tracer_of",
]

T = TypeVar("T")
S = TypeVar("S", bound=Service)


def host_of(worker: Worker) -> ServiceHost:
    """Return what a worker offers to its services.

    Args:
        worker: it must be running.

    Raises:
        NotStartedError: the worker does not run.
        UsageError: `worker` is not a worker.
    """
    check_kind("worker", worker, Worker, "a worker")
    worker.parts.check_running()
    return worker.parts


def add_service(worker: Worker, make: Callable[[ServiceHost], Service]) -> None:
    """Give a worker a service.

    Add it before the worker starts: from then on peers may send messages to it.  A
    message for a service that a worker does not have is refused.

    Args:
        worker: it has not been started.
        make: called with the host as the worker starts; returns the service, such as
            its class.

    Raises:
        UsageError: an argument has the wrong type, or the worker has been started.

    Example:
        >>> worker = asyncrpc.Worker("ps", rank=0, world_size=2)
        >>> add_service(worker, Counter)
        >>> async with worker: ...
    """
    check_kind("worker", worker, Worker, "a worker")
    check_callable("make", make)
    if worker.parts.lifecycle.state is not WorkerState.NEW:
        raise UsageError(
            f"add services to worker {worker.name!r} before it starts: peers may have "
            "sent messages to this one already"
        )
    worker.parts.extensions.append(lambda parts: parts.services.add(make(parts)))


def trace_by(worker: Worker, tracer: CallTracer) -> None:
    """Show the calls that a worker makes and serves from now on in traces.

    Args:
        worker: running or not.
        tracer: is told of each call; it takes the place of an earlier one.

    Raises:
        UsageError: an argument has the wrong type.
    """
    check_kind("worker", worker, Worker, "a worker")
    try:
        is_tracer = callable(tracer.called) and callable(tracer.served)
    except Exception:  # noqa: BLE001  (an object of the program)
        is_tracer = False
    if not is_tracer:
        raise wrong("tracer", "a CallTracer", tracer)
    worker.parts.trace_by(tracer)


def tracer_of(worker: Worker) -> CallTracer | None:
    """Return what shows the calls of a worker in traces; None: nothing does.

    What makes work for a worker in a way of its own, such as a web server, shows it by
    the same tracer.

    Args:
        worker: running or not.

    Raises:
        UsageError: `worker` is not a worker.
    """
    check_kind("worker", worker, Worker, "a worker")
    return worker.parts.tracer


def service_of(worker: Worker, kind: type[S]) -> S:
    """Return the service of a worker that is of a class.

    Args:
        worker: it must be running.
        kind: the class of the service.

    Raises:
        NotStartedError: the worker does not run.
        UsageError: the worker has no such service.
    """
    check_kind("worker", worker, Worker, "a worker")
    check_kind("kind", kind, type, "a class")
    worker.parts.check_running()
    service = worker.parts.services.of_kind(kind)
    if service is not None:
        return service
    raise UsageError(
        f"worker {worker.name!r} has no service of class {kind.__name__}; add it with "
        "asyncrpc.extend.add_service before the worker starts"
    )


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
        UsageError: an argument is of another kind, or another event loop runs here.
        MalformedError: the content of the answer is invalid.
        NotStartedError: this worker does not run.
        AsyncRpcError: no answer came, or the answer is this error.

    Cancellation:
        The peer is told to stop.
    """
    if isinstance(link, Link):  # not one that stands for a link, in a test
        link.host.check_on_loop("asyncrpc.extend.ask")
    return await ports.ask(link, request, deadline=deadline, device_map=device_map)
