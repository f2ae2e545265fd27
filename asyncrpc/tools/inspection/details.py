"""What a worker tells of its calls, its training, or itself in detail."""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncrpc.core.ids import ContextId
from asyncrpc.core.services.schema import Count
from asyncrpc.core.trace.events import BackwardPassEnded, OptimizerStepEnded
from asyncrpc.tools.inspection.machine.rates import CallRates
from asyncrpc.tools.inspection.records import CallKey

FUNCTIONS_MAX: Final = 100
LINKS_MAX: Final = 200
BUCKETS_MAX: Final = 64
PASSES_MAX: Final = 50
CALLS_MAX: Final = 1000

SENT: Final = "sent"
KEPT_BACK: Final = "waits for room at the callee"
RUNS: Final = "runs"
WAITS_FOR_THREAD: Final = "waits for a thread"
WAITS_FOR_VALUE: Final = "waits for a referenced value"


def context_name(context_id: ContextId | None) -> str:
    """Return how an autograd context is named for people; empty for none."""
    return "" if context_id is None else str(context_id)


class CallSeen(NamedTuple):
    """A call under way, as one of its ends sees it.

    Attributes:
        other: name of the worker at the other end.
        function: name of the function; empty if it could not be read.
        for_s: seconds since it was made, or arrived.
        state: its state here: `SENT` or `KEPT_BACK` at its caller; `RUNS`,
            `WAITS_FOR_THREAD` or `WAITS_FOR_VALUE` at its callee.
        is_stream: whether it sends items.
    """

    key: CallKey
    is_served: bool
    other: str
    function: str
    for_s: float
    state: str
    is_stream: bool


class CallsSeen(NamedTuple):
    """The open calls of one worker.

    Attributes:
        calls: the oldest of each link.
    """

    calls: list[CallSeen]
    left_out: Count


class BucketRates(NamedTuple):
    """How one bucket of gradients was reduced in the last seconds.

    Attributes:
        bucket: its index, from 0.
        nbytes: of its gradients, the last time.
        per_s: reductions per second.
        p50_s: median of the time.
    """

    bucket: Count
    nbytes: Count
    per_s: float
    p50_s: float


class PassUnderWay(NamedTuple):
    """A backward pass that has not ended here.

    Attributes:
        root: name of the worker that began it.
        for_s: seconds that this worker has taken part.
    """

    context: str
    root: str
    for_s: float


class StageSpanSeen(NamedTuple):
    """One computation of a stage; see `StageSpan`."""

    kind: str
    chunk: Count
    start_s: float
    end_s: float


class StageStepSeen(NamedTuple):
    """One step of a pipeline at one stage; see `StageStep`."""

    at_s: float
    began_s: float
    context: str
    number: Count
    schedule: str
    stage: Count
    stages: Count
    spans: list[StageSpanSeen]


class TrainingSeen(NamedTuple):
    """The training of one worker.

    Attributes:
        now_s: the time by its clock, which all times here refer to.
        passes_per_s: backward passes in which it took part.
        steps_per_s: optimizer steps that it asked for.
        backward_p50_s: median of its part of backward passes; nan if there were none.
        step_p50_s: median of optimizer steps; nan if there were none.
        passes: ended backward passes, the newest last.
        under_way: backward passes that have not ended.
        steps: of optimizers, the newest last.
        stages: the last step of each pipeline of which it has a stage.
    """

    now_s: float
    passes_per_s: float
    steps_per_s: float
    collectives_per_s: float
    backward_p50_s: float
    step_p50_s: float
    passes: list[BackwardPassEnded]
    under_way: list[PassUnderWay]
    steps: list[OptimizerStepEnded]
    buckets: list[BucketRates]
    stages: list[StageStepSeen]


class FunctionRates(NamedTuple):
    """How fast a worker serves one function.

    Attributes:
        function: its name; empty if it could not be read.
        rates: of its calls in the last seconds.
    """

    function: str
    rates: CallRates


class NamedText(NamedTuple):
    """A name and a value in words."""

    name: str
    text: str


class NamedBytes(NamedTuple):
    """A kind of memory."""

    name: str
    nbytes: Count


class LinkDetails(NamedTuple):
    """One link of a worker.

    Attributes:
        peer: name of the worker at the other end.
        is_broken: whether its connection has broken, and may come back.
        transport: scheme of its connection; empty while it has none.
        lanes: further connections for large payloads.
        in_flight: calls made over it that are not answered.
        calls_served: calls received over it that are not answered.
        calls_per_s: calls over it that ended in the last seconds.
        p50_s: median of their time; nan if there were none.
    """

    peer: str
    is_broken: bool
    transport: str
    lanes: Count
    in_flight: Count
    calls_served: Count
    calls_per_s: float
    bytes_per_s: float
    p50_s: float


class WorkerDetails(NamedTuple):
    """The details of one worker, beyond its summary.

    Attributes:
        versions: of asyncrpc, torch, Python and the system.
        options: those that differ from the default.
        functions: that it serves, the most often called first.
        links: the busiest.
        memory: by kind.
    """

    versions: list[NamedText]
    addresses: list[str]
    options: list[NamedText]
    functions: list[FunctionRates]
    functions_left_out: Count
    links: list[LinkDetails]
    links_left_out: Count
    memory: list[NamedBytes]
