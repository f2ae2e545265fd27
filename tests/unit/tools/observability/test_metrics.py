"""The metrics of a worker as text, read back by prometheus_client's own parsers."""

from __future__ import annotations

import json
import re
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import openmetrics, parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from asyncrpc import LocalRendezvous, UsageError, Worker, observability
from asyncrpc.core.ids import ContextId, Incarnation, WorkerId
from asyncrpc.tools.observability.definitions import (
    DEFINITIONS,
    QUEUE_OUTCOMES,
    QUEUES,
    MetricDefinition,
    MetricKind,
)
from asyncrpc.tools.observability.metrics import LagSampler
from asyncrpc.trace import (
    OK,
    BackwardPassEnded,
    BucketReduced,
    CallEnded,
    CallServed,
    CollectiveEnded,
    OptimizerStepEnded,
    StreamReceived,
    StreamSent,
)

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
parsed_openmetrics: Any = openmetrics_parser.text_string_to_metric_families
parsed_text: Any = parser.text_string_to_metric_families
PAGE = Path(__file__).parents[4] / "docs" / "reference" / "metrics.md"
SUFFIX = re.compile(r"_(bucket|count|sum|total|info)$")


def new_worker(name: str = "a") -> Worker:
    return Worker(name, rank=0, rendezvous=LocalRendezvous(1))


def all_noted(worker: Worker) -> None:
    """Let one event of each kind have happened."""
    recorder = worker.parts.recorder
    b = WorkerId('b"\\\n', Incarnation(2))
    context = ContextId(Incarnation(1), 1)
    odd = 'f"\\\n<lambda>'
    recorder.calls.record(CallEnded(2.0, 1.0, b, odd, 1, OK, 5000, 5000, "t"))
    recorder.calls.record(CallEnded(2.0, 1.0, b, "g", 2, "RemoteError", 0, 0, "t"))
    recorder.served.record(CallServed(2.0, 1.0, 1.5, b, "f", 1, OK))
    recorder.received.record(StreamReceived(2.0, 1.0, b, "s", 1, OK, 7, "t"))
    recorder.sent.record(StreamSent(2.0, 1.0, b, "s", 1, OK, 7))
    recorder.references.record((1.0, (1, 1), "made"))
    recorder.passes.record(
        BackwardPassEnded(
            *(2.0, 1.0, context, "a"), is_committed=True, pass_number=1, task="t"
        )
    )
    recorder.steps.record(OptimizerStepEnded(2.0, 1.0, "SGD", (), OK, "t"))
    recorder.collectives.record(
        CollectiveEnded(
            *(2.0, 1.0, "g", "barrier", 0, 0, ("a",), "", None, OK, 7, "t"),
        )
    )
    recorder.buckets.record(BucketReduced(2.0, 1.0, 0, 64, "t"))
    recorder.links.record((1.0, b, "opened", ""))
    recorder.membership.record((1.0, b, "joined"))
    recorder.memory.record((1.0, "slab", "taken", 64))
    figures = dict.fromkeys((*QUEUES, *QUEUE_OUTCOMES), 1.0)
    worker.parts.queues["predict"] = lambda: figures


def counted(**options: Any) -> observability.Metrics:
    """Return the metrics of a worker for which one event of each kind happened."""
    worker = new_worker()
    with observability.Metrics(worker, **options) as metrics:
        all_noted(worker)
        vars(metrics)["_figures"].loop_lags.put((0.1,))
        vars(metrics)["_figures"].gil_lags.put((0.1,))
    return metrics


@pytest.mark.parametrize(
    ("accept", "parse", "kind"),
    [
        (OPENMETRICS, parsed_openmetrics, openmetrics.exposition.CONTENT_TYPE_LATEST),
        (
            f"{OPENMETRICS},application/openmetrics-text;version=0.0.1;q=0.7,*/*",
            parsed_openmetrics,
            openmetrics.exposition.CONTENT_TYPE_LATEST,
        ),
        (
            "application/openmetrics-text;version=0.0.1",
            parsed_text,
            "text/plain; version=0.0.4; charset=utf-8",
        ),
        ("*/*", parsed_text, "text/plain; version=0.0.4; charset=utf-8"),
        ("", parsed_text, "text/plain; version=0.0.4; charset=utf-8"),
    ],
)
def test_metrics_text_has_the_negotiated_content_type(
    accept: str, parse: Any, kind: str
) -> None:
    text = counted(peers_max=3).text(accept)
    assert isinstance(text, observability.MetricsText)
    assert text.content_type == kind
    names = {family.name for family in parse(text.body.decode())}
    bare = {SUFFIX.sub("", name) for name in names}
    assert bare == {SUFFIX.sub("", definition.name) for definition in DEFINITIONS}


@pytest.mark.parametrize("accept", ["text/plain;version=x", "application/, ;;=", "ü"])
def test_odd_accept_header_gets_plain_text(accept: str) -> None:
    assert b"asyncrpc_worker_info" in counted().text(accept).body


def test_escaped_labels_survive_the_text() -> None:
    text = counted().text(OPENMETRICS).body.decode()
    families = {family.name: family for family in parsed_openmetrics(text)}
    samples = families["rpc_client_call_duration_seconds"].samples
    methods = {sample.labels["rpc_method"] for sample in samples}
    assert methods == {'f"\\\n<lambda>', "g"}
    assert {sample.labels["rpc_system_name"] for sample in samples} == {"asyncrpc"}
    assert {sample.labels["error_type"] for sample in samples} == {"", "RemoteError"}


@pytest.mark.parametrize("with_process", [False, True])
def test_metrics_text_equals_the_collector(with_process: bool) -> None:  # noqa: FBT001
    metrics = counted(peers_max=3, with_process=with_process)
    text = metrics.text(OPENMETRICS).body.decode()
    of_the_process = "process_"
    read = {
        family.name: (
            family.type,
            family.unit,
            family.documentation,
            sorted_samples(family),
        )
        for family in parsed_openmetrics(text)
        if not family.name.startswith(of_the_process)
    }
    collected = {
        family.name: (
            family.type,
            family.unit,
            family.documentation,
            sorted_samples(family),
        )
        for family in metrics.collector.collect()
    }
    assert read == collected
    assert (of_the_process in text) == with_process


def sorted_samples(family: Any) -> list[Any]:
    return sorted(
        (sample.name, sorted(sample.labels.items()), float(sample.value))
        for sample in family.samples
    )


def test_histogram_ends_with_its_total_count() -> None:
    text = counted().text(OPENMETRICS).body.decode()
    families = {family.name: family for family in parsed_openmetrics(text)}
    samples = families["rpc_server_call_duration_seconds"].samples
    by_bound = {
        sample.labels["le"]: sample.value for sample in samples if "le" in sample.labels
    }
    assert (by_bound["0.5"], by_bound["1.0"], by_bound["+Inf"]) == (0, 1, 1)


def test_collector_registers_beside_those_of_the_program() -> None:
    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    prometheus_client.Counter("mine", "of the program", registry=registry)
    metrics = counted()
    registry.register(metrics.collector)
    assert registry.get_sample_value("asyncrpc_worker_running") == 0
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(counted().collector)
    registry.unregister(metrics.collector)


def test_process_metrics_are_given_on_request() -> None:
    name = b"process_resident_memory_bytes"
    assert name in counted(with_process=True).text().body
    assert name not in counted().text().body


def test_unstarted_worker_has_no_links() -> None:
    with observability.Metrics(new_worker()) as metrics:
        text = metrics.text().body.decode()
    assert 'asyncrpc_links{state="open"} 0' in text
    assert 'asyncrpc_worker_info{worker="a",rank="0",' in text


def test_metrics_count_once() -> None:
    metrics = counted()
    with pytest.raises(UsageError, match="make new ones"):
        metrics.__enter__()
    closed = observability.Metrics(new_worker())
    closed.close()
    closed.close()
    with pytest.raises(UsageError, match="make new ones"):
        closed.__enter__()


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    words = r"pip install 'asyncrpc-torch\[metrics\]'"
    metrics = observability.Metrics(new_worker())
    assert b"asyncrpc_worker_info" in metrics.text().body
    with pytest.raises(UsageError, match=words):
        _ = metrics.collector
    with pytest.raises(UsageError, match=words):
        observability.Metrics(new_worker(), with_process=True)


def test_lag_sampler_reports_until_it_ends() -> None:
    reported = threading.Event()
    lags: list[float] = []

    def tell(lag_s: float) -> None:
        lags.append(lag_s)
        reported.set()

    sampler = LagSampler("sampler", lambda: None, lags.append, tell)
    sampler.start()
    assert reported.wait(60)
    sampler.end()
    assert sampler.blocked_s == 0
    assert lags


# --- the reference page, and the board -----------------------------------------------


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize(
    "definition", DEFINITIONS, ids=lambda definition: definition.name
)
def test_each_metric_has_its_row_in_the_reference(definition: MetricDefinition) -> None:
    (row,) = [row for row in rows() if row[0] == f"`{definition.name}`"]
    labels = ", ".join(
        f"`{label}`" for label in (*definition.labels, *definition.constant)
    )
    assert row[1:4] == [definition.kind.value, labels, definition.unit]


def test_reference_has_no_other_rows() -> None:
    named = {row[0].strip("`") for row in rows()}
    assert named == {definition.name for definition in DEFINITIONS}


def board_queries() -> list[str]:
    text = (files("asyncrpc.tools.observability") / "grafana.json").read_text()
    panels = json.loads(text)["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_command_of_the_page_prints_the_board(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Path("docs/how-to/monitor.md").read_text("utf-8")
    (command,) = re.findall(r'^\$ python -c "(.*)" > board\.json$', page, re.MULTILINE)
    exec(command, {})  # noqa: S102  (the page's)
    assert json.loads(capsys.readouterr().out)["panels"]


@pytest.mark.parametrize("query", board_queries())
def test_board_uses_existing_metrics_and_labels(query: str) -> None:
    of_the_process = {"process_resident_memory_bytes"}
    written = {
        f"{definition.name}{suffix}": {*definition.labels, *definition.constant}
        for definition in DEFINITIONS
        for suffix in (
            ("_bucket", "_count", "_sum")
            if definition.kind is MetricKind.HISTOGRAM
            else ("",)
        )
    }
    asked = set(re.findall(r"\b((?:asyncrpc|rpc|process)_\w+)\{", query))
    assert asked
    assert asked <= written.keys() | of_the_process
    grouped = set(re.split(r",\s*", "".join(re.findall(r"by \(([^)]*)\)", query))))
    known = {"", "le", "job", "instance"}.union(*(written.get(n, ()) for n in asked))
    assert grouped <= known
