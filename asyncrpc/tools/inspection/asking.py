"""What a program asks about its own group."""

from __future__ import annotations

from asyncrpc.core.arguments import check_duration, check_kind
from asyncrpc.core.worker import Worker, current_worker
from asyncrpc.extend import host_of, service_of
from asyncrpc.tools.inspection.look_from_worker import graph_of_seen
from asyncrpc.tools.inspection.machine.graph import find_hangs
from asyncrpc.tools.inspection.machine.wording import sentence, unnamed_troubles
from asyncrpc.tools.inspection.service import InspectionService


async def why(*, after_s: float = 10.0, worker: Worker | None = None) -> list[str]:
    """Return why the group is stuck, in the words of the command `asyncrpc why`.

    The other workers are asked over this worker's connections; missing ones are made.
    Of more than 64 others only the first 64 are looked at.

    Args:
        after_s: seconds that a wait may take.
        worker: the worker that looks; None: the current worker.

    Returns:
        One sentence for each finding, the gravest first; empty if nothing waits for
        longer, and all workers answer.

    Raises:
        UsageError: an argument has the wrong type; or this is not the worker's event
            loop.
        NotStartedError: the worker does not run.

    Cancellation:
        The workers that have been asked are told to stop.

    Example:
        >>> for sentence in await asyncrpc.inspection.why(after_s=60.0):
        ...     print(sentence)
    """
    check_duration("after_s", after_s)
    asked = current_worker() if worker is None else worker
    check_kind("worker", asked, Worker, "a Worker or None")
    host_of(asked).check_on_loop("asyncrpc.inspection.why")
    service = service_of(asked, InspectionService)
    graph = graph_of_seen(await service.look())
    hangs = find_hangs(graph, after_s=after_s)
    return [
        *(sentence(graph, hang) for hang in hangs),
        *unnamed_troubles(graph, hangs),
    ]
