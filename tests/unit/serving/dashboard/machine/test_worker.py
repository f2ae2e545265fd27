"""One worker: its tasks, threads, links, functions and last events."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.core.ids import ContextId, Incarnation, MessageId, RRefId, WorkerId
from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.serving.dashboard.machine.overview import KEYS
from asyncrpc.serving.dashboard.machine.worker import (
    ACTORS_MAX,
    EVENTS_MAX,
    FRAMES_MAX,
    WorkerAnswer,
    shown,
    shown_silent,
)
from asyncrpc.tools.inspection.details import (
    FunctionRates,
    LinkDetails,
    NamedBytes,
    NamedText,
    WorkerDetails,
)
from asyncrpc.tools.inspection.events import KIND_NAMES, RecentEvents
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX
from asyncrpc.tools.inspection.records import NoAnswer, Trouble, Wait
from asyncrpc.trace import (
    OK,
    BackwardPassEnded,
    BackwardSegmentEnded,
    BucketReduced,
    CallEnded,
    CallServed,
    CollectiveEnded,
    LinkChanged,
    MembershipChanged,
    MemoryChanged,
    OptimizerStepEnded,
    ReferenceChanged,
    StreamReceived,
    StreamSent,
)
from tests.unit.serving.dashboard.machine.seen import (
    EVENT,
    RUNS,
    actor,
    frames,
    snapshot,
    thread,
)
from tests.unit.serving.dashboard.machine.told import (
    HUGE,
    NO_NUMBERS,
    ODD_NAMES,
    as_sent,
    calls_a_second,
    column,
    done,
    rows_of,
    summary,
)

PEER = WorkerId("b", Incarnation(2))
NO_DETAILS = WorkerDetails([], [], [], [], 0, [], 0, [])


def recent(**kinds: list[Any]) -> RecentEvents:
    """Return events of a worker whose clock shows 100 s, 1,000 s after 1970."""
    lists: dict[str, list[Any]] = {name: kinds.get(name, []) for name in KIND_NAMES}
    return RecentEvents(100.0, 1_000_000_000_000, [], **lists)


def link(**fields: Any) -> LinkDetails:
    plain = LinkDetails(
        "b",
        is_broken=False,
        transport="uds",
        lanes=2,
        in_flight=3,
        calls_served=4,
        calls_per_s=5.0,
        bytes_per_s=6.0,
        p50_s=0.25,
    )
    return plain._replace(**fields)


def look(**fields: Any) -> dict[str, Any]:
    """Return a worker that has nothing to tell but what is given."""
    plain = WorkerAnswer(summary(), NO_DETAILS, snapshot("a"), recent())
    return done(shown("a", 0, plain._replace(**fields)))[0]


# --- all of it -----------------------------------------------------------------------


def test_idle_worker_has_all_keys_and_empty_lists() -> None:
    answer = look()
    assert set(answer) >= set(KEYS)
    assert set(answer) == set(shown_silent("a", 0, NoAnswer(Trouble.GONE, "")))
    for name in ("functions", "tasks", "threads", "links", "events"):
        assert answer[name] == []
        assert answer[f"{name}_left_out"] == 0
    assert (answer["state"], answer["trouble"], answer["why"]) == ("well", None, None)
    assert answer["task_count"] == 1
    assert answer["internal_left_out"] == 0


@pytest.mark.parametrize("trouble", list(Trouble))
def test_silent_worker_gives_its_reason(trouble: Trouble) -> None:
    answer = shown_silent("a", 4, NoAnswer(trouble, "since noon"))
    assert (answer["worker"], answer["rank"]) == ("a", 4)
    assert answer["trouble"] == trouble.name.lower()
    assert answer["why"] == f"{trouble.value}: since noon"
    assert answer["task_count"] is None
    unknown = set(KEYS) - {"worker", "rank", "state", "tasks"}
    assert all(answer[key] is None for key in unknown)


def test_details_are_listed_by_name() -> None:
    details = WorkerDetails(
        versions=[NamedText("torch", "2.6")],
        addresses=["uds:///x", "tcp://127.0.0.1:1"],
        options=[NamedText("secret", "given")],
        functions=[FunctionRates("f", calls_a_second(2.0, failed=1.0, p99_s=0.5))],
        functions_left_out=3,
        links=[link()],
        links_left_out=9,
        memory=[NamedBytes("slabs", HUGE)],
    )
    answer = look(details=details)
    assert answer["versions"] == {"torch": "2.6"}
    assert answer["addresses"] == ["uds:///x", "tcp://127.0.0.1:1"]
    assert answer["options"] == {"secret": "given"}
    assert answer["memory"] == {"slabs": HUGE}
    keys = "function per_s failed_per_s p50_s p99_s"
    assert rows_of(answer["functions"], keys) == [("f", 2.0, 1.0, 0.25, 0.5)]
    keys = "peer state transport lanes in_flight served calls_per_s bytes_per_s p50_s"
    assert rows_of(answer["links"], keys) == [
        ("b", "open", "uds", 2, 3, 4, 5.0, 6.0, 0.25)
    ]
    assert (answer["functions_left_out"], answer["links_left_out"]) == (3, 9)


def test_missing_names_are_null_and_broken_links_are_marked() -> None:
    links = [link(is_broken=True, transport="")]
    rates = FunctionRates("", calls_a_second(0.0))
    answer = look(details=NO_DETAILS._replace(links=links, functions=[rates]))
    assert answer["links"][0]["state"] == "broken"
    assert answer["links"][0]["transport"] is None
    assert answer["functions"][0]["function"] is None


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_nonfinite_numbers_are_null_everywhere(value: float) -> None:
    links = [link(calls_per_s=value, bytes_per_s=value, p50_s=value)]
    rates = calls_a_second(value, failed=value, p99_s=value, nbytes=value)
    functions = [FunctionRates("f", rates)]
    answer = look(
        summary=summary(running_s=value, lag_s=value),
        details=NO_DETAILS._replace(links=links, functions=functions),
        snapshot=snapshot("a", [actor("t", Wait(WaitKind.EVENT, "e", value))]),
        recent=recent(links=[LinkChanged(value, PEER, "opened", "")]),
    )
    as_sent(answer)
    for key in ("calls_per_s", "bytes_per_s", "p50_s"):
        assert answer["links"][0][key] is None
    for key in ("per_s", "failed_per_s", "p50_s", "p99_s"):
        assert answer["functions"][0][key] is None
    assert answer["tasks"][0]["age_s"] is None
    assert answer["events"][0]["at_s"] is None


# --- tasks and threads ---------------------------------------------------------------


def test_tasks_and_threads_are_separate_and_internal_ones_counted() -> None:
    actors = [
        actor("asyncrpc's", is_internal=True),
        actor("t", EVENT),
        thread("main", Wait(WaitKind.LOCK, "Lock `x`", 1.0)),
        thread("asyncrpc-a-0", is_internal=True),
        thread("runs"),
    ]
    answer = look(snapshot=snapshot("a", actors))
    chain = ["train.py:1 in f1", "train.py:2 in f2"]
    keys = "name state age_s waits_for chain chain_left_out"
    assert rows_of(answer["tasks"], keys) == [
        ("t", "waits", 4.0, "waits for Event `go`", chain, 0)
    ]
    assert column(answer["threads"], "name") == ["main", "runs"]
    assert column(answer["threads"], "state") == ["waits", "runs"]
    assert answer["threads"][1]["waits_for"] == "runs `step()`"
    assert answer["internal_left_out"] == 2


def test_unnamed_task_has_the_name_of_its_function() -> None:
    tasks = [actor("Task-7", function="serve"), actor("mine", function="serve")]
    answer = look(snapshot=snapshot("a", tasks))
    assert column(answer["tasks"], "name") == ["serve", "mine"]


def test_longest_wait_comes_first_and_unknown_ages_last() -> None:
    ages = [1.0, -1.0, 9.0, 1.0, 5.0]
    tasks = [
        actor(f"t{place}", Wait(WaitKind.EVENT, "e", age_s))
        for place, age_s in enumerate(ages)
    ]
    answer = look(snapshot=snapshot("a", tasks))
    assert column(answer["tasks"], "name") == ["t2", "t4", "t0", "t3", "t1"]
    assert column(answer["tasks"], "age_s") == [9.0, 5.0, 1.0, 1.0, None]


@pytest.mark.parametrize("count", [0, 1, ACTORS_MAX, ACTORS_MAX + 1, 3000])
@pytest.mark.parametrize("left_out", [0, 7])
def test_shown_actors_are_limited_and_rest_counted(count: int, left_out: int) -> None:
    actors = [actor(f"t{number}") for number in range(count)]
    actors += [thread(f"x{number}") for number in range(count)]
    answer = look(snapshot=snapshot("a", actors, left_out=left_out))
    assert len(answer["tasks"]) == len(answer["threads"]) == min(count, ACTORS_MAX)
    more = max(0, count - ACTORS_MAX)
    assert answer["tasks_left_out"] == more + left_out
    assert answer["threads_left_out"] == more


@pytest.mark.parametrize("count", [0, 1, FRAMES_MAX, FRAMES_MAX + 1, 500])
def test_shown_frames_are_limited_to_the_innermost_last(count: int) -> None:
    stack = frames(count)
    actors = [actor("t", frames=stack), thread("x", frames=stack)]
    answer = look(snapshot=snapshot("a", actors))
    lines = [f"train.py:{line} in f{line}" for line in range(1, count + 1)]
    assert answer["tasks"][0]["chain"] == lines[-FRAMES_MAX:]
    assert answer["tasks"][0]["chain_left_out"] == max(0, count - FRAMES_MAX)
    assert answer["threads"][0]["stack"] == lines[-FRAMES_MAX:]
    assert answer["threads"][0]["stack_left_out"] == max(0, count - FRAMES_MAX)


def test_deep_stacks_come_in_slices() -> None:
    actors = [actor(f"t{number}", frames=frames(50)) for number in range(ACTORS_MAX)]
    plain = WorkerAnswer(summary(), NO_DETAILS, snapshot("a", actors), recent())
    _, steps = done(shown("a", 0, plain))
    assert sorted(steps)[-2:] == [180, ACTORS_MAX]  # six stacks, and who there is
    assert sum(steps) == ACTORS_MAX + ACTORS_MAX * FRAMES_MAX


# --- events --------------------------------------------------------------------------

SPAN = (1.0, 0.5)  # when it ended and began
CONTEXT = ContextId(Incarnation(1), 1)
MESSAGE = MessageId(Incarnation(1), 1)
EVENTS: dict[str, tuple[Any, str, str]] = {
    "calls": (CallEnded(*SPAN, PEER, "f", 1, OK, 0, 0, ""), "call made", "f on b"),
    "served": (CallServed(*SPAN, 0.5, PEER, "f", 1, OK), "call served", "f for b"),
    "received": (
        StreamReceived(*SPAN, PEER, "f", 1, OK, 3, ""),
        *("stream received", "f on b"),
    ),
    "sent": (StreamSent(*SPAN, PEER, "f", 1, OK, 3), "stream sent", "f for b"),
    "references": (
        ReferenceChanged(1.0, RRefId(Incarnation(1), 4), "freed"),
        *("reference", "#0000000000000004 freed"),
    ),
    "passes": (
        BackwardPassEnded(*SPAN, CONTEXT, "b", True, 1, ""),  # noqa: FBT003
        *("backward pass", "begun by b: committed"),
    ),
    "segments": (
        BackwardSegmentEnded(*SPAN, CONTEXT, "b", 1, 9, (MESSAGE,), (), 0, OK),
        *("backward segment", "of 9 nodes, begun by b"),
    ),
    "steps": (
        OptimizerStepEnded(*SPAN, "SGD", ("a", "b"), OK, ""),
        *("optimizer step", "SGD on a, b"),
    ),
    "collectives": (
        CollectiveEnded(
            at_s=1.0,
            began_s=0.5,
            group="group 'g'",
            operation="all_reduce",
            number=3,
            rank=0,
            members=("a", "b"),
            dtype="float32",
            shape=(2,),
            outcome=OK,
            group_id=1,
            task="",
        ),
        "collective",
        "all_reduce 3 of group 'g'",
    ),
    "buckets": (BucketReduced(*SPAN, 2, 64, ""), "bucket", "2, 64 bytes"),
    "links": (LinkChanged(1.0, PEER, "ended", "lost"), "link", "to b ended: lost"),
    "membership": (MembershipChanged(1.0, PEER, "joined"), "member", "b joined"),
    "memory": (
        MemoryChanged(1.0, "slab", "taken", 64),
        "memory",
        "slab taken, 64 bytes",
    ),
}


def text_of(kind: str, event: Any) -> str:
    (event_shown,) = look(recent=recent(**{kind: [event]}))["events"]
    text: str = event_shown["text"]
    return text


def test_example_events_cover_every_kind() -> None:
    assert set(EVENTS) == set(KIND_NAMES)


@pytest.mark.parametrize("kind", EVENTS)
def test_each_kind_of_event_has_a_text(kind: str) -> None:
    event, words, text = EVENTS[kind]
    answer = look(recent=recent(**{kind: [event]}))
    assert answer["events"] == [{"at_s": 1000.0 - 99.0, "kind": words, "text": text}]
    if "outcome" in event._fields:
        assert text_of(kind, event._replace(outcome="KeyError")) == f"{text} (KeyError)"


def test_missing_fields_of_an_event_are_left_out_of_its_text() -> None:
    call_event, dropped = EVENTS["calls"][0], EVENTS["passes"][0]
    assert text_of("calls", call_event._replace(function="")) == "? on b"
    assert text_of("served", EVENTS["served"][0]._replace(function="")) == "? for b"
    assert (
        text_of("passes", dropped._replace(is_committed=False)) == "begun by b: dropped"
    )
    assert text_of("links", EVENTS["links"][0]._replace(reason="")) == "to b ended"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "SGD on "),
        (1, "SGD on w0"),
        (3, "SGD on w0, w1, w2"),
        (5, "SGD on w0, w1, w2 and 2 more"),
    ],
)
def test_step_text_names_a_limited_number_of_owners(count: int, text: str) -> None:
    owners = tuple(f"w{number}" for number in range(count))
    assert text_of("steps", EVENTS["steps"][0]._replace(owners=owners)) == text


def test_events_of_all_kinds_are_in_one_order_newest_first() -> None:
    event = EVENTS["links"][0]
    events = look(
        recent=recent(
            links=[event._replace(at_s=at_s) for at_s in (10.0, 40.0)],
            memory=[MemoryChanged(at_s, "slab", "taken", 1) for at_s in (20.0, 30.0)],
        )
    )["events"]
    assert column(events, "at_s") == [940.0, 930.0, 920.0, 910.0]
    assert column(events, "kind") == ["link", "memory", "memory", "link"]


@pytest.mark.parametrize("count", [EVENTS_MAX // 2, EVENTS_MAX, 3 * SLICE_MAX])
def test_shown_events_are_limited_to_the_newest_of_all_kinds(count: int) -> None:
    event = EVENTS["links"][0]
    recorded = recent(
        links=[event._replace(at_s=float(at)) for at in range(count)],
        memory=[MemoryChanged(at + 0.5, "slab", "taken", 1) for at in range(count)],
    )
    plain = WorkerAnswer(summary(), NO_DETAILS, snapshot("a"), recorded)
    answer, steps = done(shown("a", 0, plain))
    times = sorted((at / 2 for at in range(2 * count)), reverse=True)
    shown_times = [at_s - 900.0 for at_s in column(answer["events"], "at_s")]
    assert shown_times == times[:EVENTS_MAX]
    assert answer["events_left_out"] == 2 * count - len(answer["events"])
    assert max(steps) <= SLICE_MAX


# --- names ---------------------------------------------------------------------------


def test_odd_names_stay_text() -> None:
    for name in ODD_NAMES:
        odd = WorkerId(name, Incarnation(9))
        answer = look(
            summary=summary(host=name),
            details=NO_DETAILS._replace(
                versions=[NamedText(name, name)],
                addresses=[name],
                options=[NamedText(name, name)],
                functions=[FunctionRates(name, calls_a_second(1.0))],
                memory=[NamedBytes(name, 1)],
            ),
            snapshot=snapshot(
                name,
                [actor(name, RUNS._replace(what=name)), thread(name, function=name)],
            ),
            recent=recent(
                calls=[EVENTS["calls"][0]._replace(to=odd, function=name)],
                links=[EVENTS["links"][0]._replace(peer=odd, reason=name)],
            ),
        )
        assert as_sent(answer) == answer
        assert answer["threads"][0]["name"] == name
        assert answer["versions"] == {name: name}
    silent = shown_silent(ODD_NAMES[0], 0, NoAnswer(Trouble.SILENT, ODD_NAMES[0]))
    assert as_sent(silent) == silent
