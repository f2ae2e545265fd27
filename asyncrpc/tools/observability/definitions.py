"""The metrics: names, labels, units and descriptions.

Names of calls are OpenTelemetry's, as Prometheus writes them.  The values of labels are
names of methods, and outcomes: no metric grows with the number of calls or workers.

Source: OpenTelemetry's semantic conventions for RPC, version 1.45: `rpc.client.call.
duration` and `rpc.server.call.duration`, with the attributes `rpc.system.name`,
`rpc.method` and `error.type`.  All other names begin with `asyncrpc_`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final

from asyncrpc import Counters
from asyncrpc.tools.observability.histograms import (
    BYTES_BOUNDS,
    ITEMS_BOUNDS,
    SECONDS_BOUNDS,
)

SYSTEM: Final = {"rpc_system_name": "asyncrpc"}


class MetricKind(enum.Enum):
    """How to interpret the figures of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MetricDefinition:
    """One metric.

    Attributes:
        name: in Prometheus' form, with `_total` or `_info` at the end of such a metric.
        labels: names of the labels whose values differ between series.
        unit: of the figures: "seconds", "bytes", or empty.
        constant: labels that all series have, with their values.
    """

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    bounds: Sequence[float] = ()
    constant: dict[str, str] = dataclasses.field(default_factory=dict)


def _seconds(
    name: str, text: str, *labels: str, constant: dict[str, str] | None = None
) -> MetricDefinition:
    return MetricDefinition(
        f"{name}_seconds",
        MetricKind.HISTOGRAM,
        text,
        labels,
        "seconds",
        SECONDS_BOUNDS,
        constant or {},
    )


def _sizes(name: str, text: str) -> MetricDefinition:
    return MetricDefinition(
        f"{name}_bytes",
        MetricKind.HISTOGRAM,
        text,
        ("rpc_method",),
        "bytes",
        BYTES_BOUNDS,
        SYSTEM,
    )


def _items(name: str, text: str) -> MetricDefinition:
    kind = MetricKind.HISTOGRAM
    return MetricDefinition(name, kind, text, ("rpc_method",), "", ITEMS_BOUNDS)


def _counter(name: str, text: str, *labels: str, unit: str = "") -> MetricDefinition:
    return MetricDefinition(f"{name}_total", MetricKind.COUNTER, text, labels, unit)


def _gauge(name: str, text: str, *labels: str, unit: str = "") -> MetricDefinition:
    return MetricDefinition(name, MetricKind.GAUGE, text, labels, unit)


_CALL: Final = ("rpc_method", "error_type")

# --- calls ---------------------------------------------------------------------------

CLIENT_DURATION: Final = _seconds(
    "rpc_client_call_duration",
    "Time from the making of a call to its answer, or until the caller gave up",
    *_CALL,
    constant=SYSTEM,
)
SERVER_DURATION: Final = _seconds(
    "rpc_server_call_duration",
    "Time from the arrival of a request until it was answered, or given up",
    *_CALL,
    constant=SYSTEM,
)
QUEUE_DURATION: Final = _seconds(
    "asyncrpc_server_queue_duration",
    "Time from the arrival of a request until its function began",
    "rpc_method",
)
REQUEST_SIZE: Final = _sizes(
    "rpc_client_request_size",
    "Buffers (tensors, arrays, long byte strings) of a request that has any",
)
RESPONSE_SIZE: Final = _sizes(
    "rpc_client_response_size", "Buffers of an answer that has any"
)
PEER_DURATION: Final = _seconds(
    "asyncrpc_client_peer_call_duration",
    "Time of a call that was made, by callee; only with peers_max",
    *("peer", "error_type"),
)
CALLER_DURATION: Final = _seconds(
    "asyncrpc_server_peer_call_duration",
    "Time of a call that was served, by caller; only with peers_max",
    *("peer", "error_type"),
)
CLIENT_IN_FLIGHT: Final = _gauge(
    "asyncrpc_client_calls_in_flight",
    "Calls and streams that were sent and have not been answered",
)
SERVER_IN_FLIGHT: Final = _gauge(
    "asyncrpc_server_calls_in_flight", "Calls and streams that are being served"
)
REFUSED: Final = _counter(
    "asyncrpc_server_calls_refused",
    "Calls that were refused: too many at once, or the worker drains",
)

# --- streams -------------------------------------------------------------------------

CLIENT_STREAM_DURATION: Final = _seconds(
    "asyncrpc_client_stream_duration",
    "Time from the request for a stream to its last item, or until it was left",
    *_CALL,
)
CLIENT_STREAM_ITEMS: Final = _items(
    "asyncrpc_client_stream_items", "Items of a stream that came"
)
SERVER_STREAM_DURATION: Final = _seconds(
    "asyncrpc_server_stream_duration",
    "Time from the arrival of a request for a stream until its end was sent",
    *_CALL,
)
SERVER_STREAM_ITEMS: Final = _items(
    "asyncrpc_server_stream_items", "Items of a stream that were sent"
)

# --- queues of requests: `serving.Batcher` and its like ------------------------------

QUEUE_WAITING: Final = _gauge(
    "asyncrpc_queue_waiting", "Requests that wait in a queue", "queue"
)
QUEUE_OLDEST: Final = _gauge(
    "asyncrpc_queue_oldest_seconds",
    "How long the oldest request in a queue has waited",
    "queue",
    unit="seconds",
)
QUEUE_RUNNING: Final = _gauge(
    "asyncrpc_queue_running", "Requests of a queue that run", "queue"
)
QUEUE_ENDED: Final = _counter(
    "asyncrpc_queue_requests", "Requests that have ended, by how", "queue", "outcome"
)
QUEUE_TURNS: Final = _counter(
    "asyncrpc_queue_turns", "Batches, sequences or blocks that have ended", "queue"
)
QUEUE_TURN_TIME: Final = _gauge(
    "asyncrpc_queue_turn_seconds",
    "Mean time of a batch, sequence or block, of the last ones",
    "queue",
    unit="seconds",
)
QUEUE_TURN_REQUESTS: Final = _gauge(
    "asyncrpc_queue_turn_requests",
    "Mean requests in a batch, of the last ones",
    "queue",
)
QUEUE_CAPACITY: Final = _gauge(
    "asyncrpc_queue_capacity",
    "Requests a second that can be done, by the last batches",
    "queue",
)
SEQUENCES_PAUSED: Final = _gauge(
    "asyncrpc_sequences_paused", "Sequences whose consumers are behind", "queue"
)
SEQUENCES_MEMORY: Final = _gauge(
    "asyncrpc_sequences_memory_held",
    "Memory that is reserved for sequences, in the unit of memory_of",
    "queue",
)
SEQUENCE_STEPS: Final = _counter(
    "asyncrpc_sequence_steps", "Steps that a model has made", "queue"
)
SEQUENCE_STEP_TIME: Final = _gauge(
    "asyncrpc_sequence_step_seconds",
    "Mean time of a step, of the last ones",
    "queue",
    unit="seconds",
)
SEQUENCE_ITEMS: Final = _counter(
    "asyncrpc_sequence_items", "Items (tokens) that a model has generated", "queue"
)
SEQUENCE_ITEMS_RATE: Final = _gauge(
    "asyncrpc_sequence_items_rate",
    "Items a second that a model generates while it works, by the last steps",
    "queue",
)
# By the name of the figure.
QUEUES: Final = {
    "waiting": QUEUE_WAITING,
    "oldest_s": QUEUE_OLDEST,
    "running": QUEUE_RUNNING,
    "turns": QUEUE_TURNS,
    "turn_s": QUEUE_TURN_TIME,
    "turn_requests": QUEUE_TURN_REQUESTS,
    "capacity_per_s": QUEUE_CAPACITY,
    "paused": SEQUENCES_PAUSED,
    "memory_held": SEQUENCES_MEMORY,
    "steps": SEQUENCE_STEPS,
    "step_s": SEQUENCE_STEP_TIME,
    "items": SEQUENCE_ITEMS,
    "items_per_s": SEQUENCE_ITEMS_RATE,
}
QUEUE_OUTCOMES: Final = frozenset(
    {"answered", "failed", "left", "refused", "expired", "shed", "evicted"}
)

# --- references ----------------------------------------------------------------------

REFERENCES: Final = _gauge(
    "asyncrpc_references", "Values that are kept here for remote references"
)
REFERENCES_CHANGED: Final = _counter(
    "asyncrpc_reference_changes",
    "Referenced values that were made, could not be made, or were freed here",
    "change",
)

# --- training ------------------------------------------------------------------------

PASS_DURATION: Final = _seconds(
    "asyncrpc_backward_pass_duration",
    "Time that this worker took part in a backward pass",
    "outcome",
)
STEP_DURATION: Final = _seconds(
    "asyncrpc_optimizer_step_duration",
    "Time of a step of a distributed optimizer that this worker asked for",
    *("optimizer", "outcome"),
)
COLLECTIVE_DURATION: Final = _seconds(
    "asyncrpc_collective_duration",
    "Time from the beginning of a collective here to its end here",
    *("operation", "outcome"),
)
BUCKET_DURATION: Final = _seconds(
    "asyncrpc_bucket_reduction_duration",
    "Time from when a bucket of gradients was full until it was reduced",
)
BUCKET_BYTES: Final = _counter(
    "asyncrpc_bucket_reduced_bytes",
    "Gradients in reduced buckets; sparse ones do not count",
    unit="bytes",
)

# --- links and members ---------------------------------------------------------------

LINKS: Final = _gauge("asyncrpc_links", "Connections to peers, by state", "state")
LINKS_CHANGED: Final = _counter(
    "asyncrpc_link_changes", "Connections that opened, broke, went on, ended", "change"
)
MEMBERS: Final = _gauge(
    "asyncrpc_members", "Members of the group that are known, this one included"
)
MEMBERS_CHANGED: Final = _counter(
    "asyncrpc_member_changes", "What became known of members", "change"
)

# --- memory --------------------------------------------------------------------------

SHARED_MEMORY: Final = _gauge(
    "asyncrpc_shared_memory_bytes",
    "Slabs that are mapped here, own ones and those of peers",
    "slabs",
    unit="bytes",
)
SHARED_MEMORY_CHANGED: Final = _counter(
    "asyncrpc_shared_memory_changes",
    "Slabs that were taken from the system, or returned",
    *("slabs", "change"),
)
RECEIVE_POOL: Final = _gauge(
    "asyncrpc_receive_pool_idle_bytes",
    "Memory of received payloads that is kept for the next ones",
    unit="bytes",
)
CREDIT_LIMIT: Final = _gauge(
    "asyncrpc_inbound_credit_limit_bytes",
    "LimitOptions.inbound_bytes_max",
    unit="bytes",
)
CREDIT_HELD: Final = _gauge(
    "asyncrpc_inbound_credit_held_bytes",
    "Large requests that arrive, run, or are being answered",
    unit="bytes",
)
CREDIT_WAITING: Final = _gauge(
    "asyncrpc_inbound_requests_waiting",
    "Large requests of peers that are known to wait for memory here",
)

# --- the process ---------------------------------------------------------------------

LOOP_LAG: Final = _seconds(
    "asyncrpc_loop_lag", "Time until the event loop took a sample, four times a second"
)
LOOP_BLOCKED: Final = _gauge(
    "asyncrpc_loop_blocked_seconds",
    "How long the event loop has not taken a sample that waits; 0 if none waits",
    unit="seconds",
)
GIL_LAG: Final = _seconds(
    "asyncrpc_gil_lag",
    "Time by which a thread that slept woke up late, four times a second: it waited "
    "for the interpreter's lock, or for a core",
)
WORKER: Final = MetricDefinition(
    "asyncrpc_worker_info",
    MetricKind.INFO,
    "The worker",
    ("worker", "rank", "world_size", "incarnation"),
)
RUNNING: Final = _gauge(
    "asyncrpc_worker_running", "1 while the worker takes calls, else 0"
)

COUNTER_TEXTS: Final = {
    "authentications_failed": "Connections whose two ends could not prove to belong "
    "together",
    "handshakes_refused": "Accepted connections that did not speak this protocol",
    "connections_dropped_unauthenticated": "Accepted connections that were ended "
    "before they had proved anything",
    "connections_resumed": "Connections, lanes too, that broke and went on",
    "code_sent": "Functions and classes that were sent to a peer by value",
    "code_received": "Functions and classes that a peer has sent by value",
    "workers_lost": "Peers that were given up, or left",
}
# `Worker.counters`, by field.
COUNTERS: Final = {
    field.name: _counter(f"asyncrpc_{field.name}", COUNTER_TEXTS[field.name])
    for field in dataclasses.fields(Counters)
}

DEFINITIONS: Final[Sequence[MetricDefinition]] = (
    *[
        definition
        for definition in vars().values()
        if isinstance(definition, MetricDefinition)
    ],
    *COUNTERS.values(),
)
