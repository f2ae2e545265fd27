"""Who waits for whom over several workers, who can never go on, and who is at fault."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest

from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.tools.inspection.machine.graph import (
    Hang,
    Node,
    find_hangs,
    graph_of,
    stuck,
)
from asyncrpc.tools.inspection.machine.wording import duration, sentence, tree
from asyncrpc.tools.inspection.records import (
    NO_ACTOR,
    ActorKind,
    CallKey,
    NoAnswer,
    ObservedActor,
    OutgoingCall,
    ServedCall,
    StackFrame,
    Trouble,
    Wait,
    WorkerSnapshot,
)

IDS = {"a": 1, "b": 2, "c": 3}
RUNS = Wait(WaitKind.RUNS, "step()")
SLEEPS = Wait(WaitKind.RUNS, "time.sleep(9)")


def task(
    name: str,
    wait: Wait,
    *,
    is_internal: bool = False,
    kind: ActorKind = ActorKind.TASK,
) -> ObservedActor:
    frames = (StackFrame(name, "/app/train.py", 7),)
    return ObservedActor(kind, name, name, frames, wait, is_internal)


def key(caller: str, callee: str, number: int = 1) -> CallKey:
    return CallKey(IDS[caller], IDS[callee], number)


def call(caller: str, callee: str, number: int = 1, *, for_s: float = 5.0) -> Wait:
    of = key(caller, callee, number)
    return Wait(WaitKind.CALL, f"`f` on '{callee}'", for_s, call=of)


def served(caller: str, callee: str, actor: int, number: int = 1) -> ServedCall:
    return ServedCall(
        key(caller, callee, number), caller, "f", 5.0, actor, is_stream=False
    )


def worker(
    name: str,
    actors: Sequence[ObservedActor],
    calls: Sequence[ServedCall] = (),
    *,
    blocked_for_s: float = 0.0,
    loop_actor: int = NO_ACTOR,
) -> WorkerSnapshot:
    outgoing = tuple(
        OutgoingCall(
            actor.wait.call,
            next((n for n, id_ in IDS.items() if id_ == actor.wait.call.callee), "?"),
            "f",
            actor.wait.for_s,
        )
        for actor in actors
        if actor.wait.call is not None
    )
    return WorkerSnapshot(
        name,
        IDS[name] - 1,
        IDS[name],
        100 + IDS[name],
        "host",
        blocked_for_s,
        loop_actor,
        tuple(actors),
        outgoing,
        tuple(calls),
    )


def lock(*holders: int, is_sure: bool = True, is_closed: bool = True) -> Wait:
    return Wait(WaitKind.LOCK, "Lock `table`", 2.5, holders, is_sure, is_closed)


def the_only(snapshots: Sequence[WorkerSnapshot], **troubles: NoAnswer) -> Hang:
    (hang,) = find_hangs(graph_of(snapshots, troubles), after_s=3.0)
    return hang


def the_sentence(snapshots: Sequence[WorkerSnapshot], **troubles: NoAnswer) -> str:
    return sentence(graph_of(snapshots, troubles), the_only(snapshots, **troubles))


def thread(name: str) -> ObservedActor:
    return task(name, SLEEPS, kind=ActorKind.THREAD)


def b_serves(*actors: ObservedActor, actor: int = 0) -> WorkerSnapshot:
    return worker("b", actors, [served("a", "b", actor)])


def blocked(
    *actors: ObservedActor, by: int, for_s: float = 9.0, **more: Any
) -> WorkerSnapshot:
    return worker("b", actors, loop_actor=by, blocked_for_s=for_s, **more)


GO = Wait(WaitKind.EVENT, "Event `go`", 4.0)
WAITS_5_S = Wait(WaitKind.EVENT, "", 5.0)
BARRIER = Wait(WaitKind.ROUND, "barrier 3", 5.0, members=("a", "b", "c"))
RESTS = Wait(WaitKind.EVENT, "Event `e`", 9.0, is_sure=False, is_closed=True)
TURN = Wait(WaitKind.TURN, "its turn to change parameters", 5.0, needs=("s",))
REDUCES = Wait(WaitKind.COLLECTIVE, "all_reduce 1", 5.0, members=("a", "b"))
BOTH_TASKS = Wait(WaitKind.TASKS, "2 tasks", 5.0, (1, 2))
CONDITION = Wait(WaitKind.CONDITION, "Condition `go`", 5.0)
ROOM = call("a", "b")._replace(kind=WaitKind.INBOUND, what="room for `f` on 'b'")
PASS = Wait(WaitKind.BACKWARD, "its pass", 5.0, calls=(key("a", "b"), key("a", "c", 2)))
CALLS_B = worker("a", [task("train", call("a", "b"))])
LONG_CALL = worker("a", [task("train", call("a", "b", for_s=500.0))])
VALUE = (
    served("a", "b", NO_ACTOR)._replace(function="", needs="v"),
    served("a", "b", 0, 2)._replace(makes="v"),
)
FILLS = task("fill", Wait(WaitKind.EVENT, "Event `full`", 5.0), is_internal=True)

# What waits, and the sentence, in which `*` stands for any text.
SENTENCES: dict[str, tuple[list[WorkerSnapshot], str]] = {
    "waiting call leads to its callee": (
        [CALLS_B, b_serves(task("f", GO))],
        (
            "a task `train` waits 5.0 s for b `f`, which waits for Event `go` "
            "(train.py:7 in f)"
        ),
    ),
    "cyclic wait is certain": (
        [CALLS_B, b_serves(task("f", lock(1)), task("evict", lock(0)))],
        (
            "* which waits for Lock `table` held by b task `f`: a cycle, which nothing "
            "can end"
        ),
    ),
    "unserved call is named in the wait": (
        [CALLS_B, b_serves(actor=NO_ACTOR)],
        "*b `f`, which waits for a thread of its pool",
    ),
    "wait for an unmade value leads to its call": (
        [CALLS_B, worker("b", [task("make", GO)], VALUE)],
        "*a value of b, which waits for Event `go`*",
    ),
    "task group wait leads to its tasks": (
        [
            worker(
                "a",
                [
                    task("t", BOTH_TASKS),
                    task("reader", RUNS),
                    task("writer", CONDITION),
                ],
            )
        ],
        "*s for task `writer`, which waits for Condition*",
    ),
    "wait for an absent member names it": (
        [
            *(worker(name, [task("train", BARRIER)]) for name in "ab"),
            worker("c", [task("train", Wait(WaitKind.SLEEP, "sleep(9)", 9.0))]),
        ],
        (
            "a task `train` waits 5.0 s for barrier 3, to which c has not come: c task "
            "`train`, which is in sleep(9) (train.py:7 in train)"
        ),
    ),
    "first of several absent members is named": (
        [
            worker("a", [task("train", BARRIER)]),
            worker("b", [task("main", RESTS)]),
            worker("c", []),
        ],
        "*to which b and 1 more have not come: b task `main`*",
    ),
    "blocked loop is reported": (
        [
            CALLS_B,
            blocked(task("f", RUNS), thread("Main"), by=1, calls=[served("a", "b", 0)]),
        ],
        "*which runs `time.sleep(9)` (train.py:7 in Main)*",
    ),
    "call unread by a blocked loop leads to the loop": (
        [CALLS_B, blocked(thread("Main"), by=0)],
        "*which runs `time.sleep(9)`*",
    ),
    "turn leads to the step that has it": (
        [
            worker("a", [task("step", TURN)]),
            worker("b", [task("commit", call("b", "c"))._replace(does=("s",))]),
            worker("c", [task("f", WAITS_5_S)], [served("b", "c", 0)]),
        ],
        (
            "a task `step` waits 5.0 s for its turn to change parameters held by b "
            "task `commit`, which waits for c `f`, which waits for*"
        ),
    ),
    "task that will join the collective is named": (
        [
            worker("a", [task("train", REDUCES._replace(needs=("g",)))]),
            worker("b", [task("rest", GO), FILLS._replace(does=("g",))]),
        ],
        (
            "a task `train` waits 5.0 s for all_reduce 1, to which b has not come: b "
            "task `fill`, which waits for Event `full` (train.py:7 in fill)"
        ),
    ),
    "call without a thread leads to the busy threads": (
        [CALLS_B, b_serves(thread("asyncrpc-b-1"), actor=NO_ACTOR)],
        (
            "a task `train` waits 5.0 s for b `f`, which waits for a thread of its "
            "pool: thread `asyncrpc-b-1`, which runs `time.sleep(9)` (train.py:7 in "
            "asyncrpc-b-1)"
        ),
    ),
    "large request leads to the calls that hold the room": (
        [
            worker("a", [task("train", ROOM)]),
            worker(
                "b", [task("keep", GO)], [served("c", "b", 0)._replace(holds_bytes=600)]
            ),
        ],
        (
            "a task `train` waits 5.0 s for room for `f` on 'b' held by b task `keep`, "
            "which waits for Event `go` (train.py:7 in keep)"
        ),
    ),
    "pass leads to all its requests": (
        [
            worker("a", [task("train", PASS)]),
            worker(
                "b",
                [task("g", WAITS_5_S)],
                [served("a", "b", 0)._replace(function="autograd.advance")],
            ),
            worker("c", []),
        ],
        "a task `train` waits 5.0 s for the backward pass on b, which waits for*",
    ),
}


@pytest.mark.parametrize(("snapshots", "text"), SENTENCES.values(), ids=SENTENCES)
def test_wait_has_its_sentence(snapshots: list[WorkerSnapshot], text: str) -> None:
    assert fnmatchcase(the_sentence(snapshots), text)


def test_silent_worker_is_reported_as_stuck() -> None:
    assert the_sentence([CALLS_B], b=NoAnswer(Trouble.STOPPED, "process 7")) == (
        "a task `train` waits 5.0 s for b, which is stuck: its process is "
        "stopped, process 7"
    )


@pytest.mark.parametrize(
    ("name", "is_cycle", "is_certain"),
    [
        ("cyclic wait is certain", True, True),
        ("first of several absent members is named", False, False),  # a task may come
    ],
)
def test_certain_hang_is_marked(name: str, *, is_cycle: bool, is_certain: bool) -> None:
    hang = the_only(SENTENCES[name][0])
    assert (hang.is_cycle, hang.is_certain) == (is_cycle, is_certain)


def test_members_in_two_collectives_wait_for_each_other() -> None:
    other = REDUCES._replace(what="all_reduce 1 of 'r'")
    hang = the_only(
        [worker("a", [task("t", REDUCES)]), worker("b", [task("t", other)])]
    )
    assert (hang.is_cycle, hang.is_certain) == (True, True)


def test_stream_producer_waits_for_its_consumer() -> None:
    of = key("a", "b")
    credit = Wait(WaitKind.CREDIT, "room at the consumer", 5.0, call=of)
    stream = Wait(WaitKind.STREAM, "`f` on 'b'", 5.0, call=of)
    graph = graph_of([worker("a", [task("read", stream)]), b_serves(task("f", credit))])
    assert graph.edges[Node("b", 0)][0].to == Node("a", 0)
    assert stuck(graph) == {Node("a", 0), Node("b", 0)}


def main_and(of: tuple[int, ...], *others: ObservedActor) -> WorkerSnapshot:
    return worker("a", [task("main", Wait(WaitKind.TASKS, "", 500.0, of)), *others])


def at_barrier(name: str, number: int, for_s: float) -> WorkerSnapshot:
    wait = Wait(WaitKind.ROUND, f"barrier {number}", for_s, members=("a", "b"))
    return worker(name, [task("train", wait)])


SHORT = call("a", "b", for_s=0.1)
IN_THREAD = Wait(WaitKind.THREADS, "a function in a thread", 0.5, (2,))
# Who waits for others that go on is no fault, however long it has waited.
FAULTS: dict[str, tuple[list[WorkerSnapshot], int]] = {
    "closed event": ([worker("a", [task("t", RESTS._replace(for_s=3600.0))])], 0),
    "item": ([worker("a", [task("t", Wait(WaitKind.ITEM, "an item", 3600.0))])], 0),
    "sleep": ([worker("a", [task("t", Wait(WaitKind.SLEEP, "sleep", 3600.0))])], 0),
    "socket": ([worker("a", [task("t", Wait(WaitKind.SOCKET, "", 3600.0))])], 0),
    "running": ([worker("a", [task("t", RUNS)])], 0),
    "short call": ([worker("a", [task("t", SHORT)]), b_serves(task("f", RUNS))], 0),
    "task of asyncrpc": ([worker("a", [task("p", lock(0), is_internal=True)])], 0),
    "lost notify that no task waits for": (
        [worker("a", [task("t", RESTS._replace(kind=WaitKind.CONDITION))])],
        1,
    ),
    "main task that waits for working tasks": (
        [main_and((1,), task("work", SHORT)), b_serves(task("f", RUNS))],
        0,
    ),
    "main task that waits for a server at rest": (
        [main_and((1, 2), task("serve", GO._replace(for_s=500.0)), task("w", RUNS))],
        0,
    ),
    "long call with changing waits": (
        [LONG_CALL, b_serves(task("f", GO._replace(for_s=0.5)))],
        0,
    ),
    "thread that has just begun": (
        [main_and((1,), task("work", IN_THREAD), thread("compute"))],
        0,
    ),
    "thread in a long function": ([LONG_CALL, b_serves(thread("f"))], 1),
    "briefly blocked loop": ([LONG_CALL, blocked(thread("f"), by=0, for_s=0.3)], 0),
    "blocked loop": ([LONG_CALL, blocked(thread("f"), by=0, for_s=30.0)], 1),
    "rounds seen at two moments": (
        [at_barrier("a", 7, 0.3), at_barrier("b", 8, 0.3)],
        0,
    ),
    "different rounds": ([at_barrier("a", 7, 2.5), at_barrier("b", 8, 2.5)], 1),
}


@pytest.mark.parametrize(("snapshots", "faults"), FAULTS.values(), ids=FAULTS)
def test_wait_is_a_fault_or_not(snapshots: list[WorkerSnapshot], faults: int) -> None:
    assert len(find_hangs(graph_of(snapshots), after_s=1.0)) == faults


def goes_on(kinds: Sequence[str], targets: Sequence[Sequence[int]]) -> set[int]:
    """Return who can go on, found by trying again and again until nothing changes."""
    going = {place for place, kind in enumerate(kinds) if kind == "runs"}
    while True:
        more = set(going)
        for place, (kind, of) in enumerate(zip(kinds, targets, strict=True)):
            ends = [node in going for node in of]
            if kind == "all" and all(ends):
                more.add(place)
            if kind == "any" and any(ends):
                more.add(place)
            if kind == "open":
                more.add(place)
        if more == going:
            return going
        going = more


def wait_of(kind: str, targets: Sequence[int]) -> Wait:
    match kind:
        case "runs":
            return RUNS
        case "all":
            return Wait(WaitKind.TASKS, "tasks", 1.0, tuple(targets))
        case "any":
            return event(targets, is_closed=True)
        case _:
            return event(targets, is_closed=False)


def event(targets: Sequence[int], *, is_closed: bool) -> Wait:
    of = tuple(targets)
    return Wait(WaitKind.EVENT, "e", 1.0, of, is_sure=False, is_closed=is_closed)


def test_stuck_tasks_are_found_in_every_group_of_three() -> None:
    """Each of three tasks runs, or waits for all or any of some others."""
    choices = []
    for place in range(3):
        others = [number for number in range(3) if number != place]
        subsets = [
            [],
            *([other] for other in others),
            others,
            [place],
            [place, *others],
        ]
        choices.append(
            [
                ("runs", []),
                *(
                    (kind, subset)
                    for kind in ("all", "any", "open")
                    for subset in subsets
                ),
            ]
        )
    for combined in itertools.product(*choices):
        kinds = [kind for kind, _ in combined]
        targets = [of for _, of in combined]
        actors = [
            task(f"t{place}", wait_of(kind, of))
            for place, (kind, of) in enumerate(combined)
        ]
        dead = {node.actor for node in stuck(graph_of([worker("a", actors)]))}
        assert dead == {0, 1, 2} - goes_on(kinds, targets), combined


def test_every_finding_has_a_sentence_and_a_tree() -> None:
    """Over all pairs of waits of two workers; nothing of it raises."""
    waits = [
        RUNS,
        call("a", "b"),
        lock(0),
        lock(1),
        lock(),
        *(Wait(kind, "", 9.0) for kind in WaitKind),
        *(event([1], is_closed=True)._replace(kind=kind) for kind in WaitKind),
        Wait(WaitKind.ROUND, "barrier 1", 9.0, members=("a", "b", "c")),
    ]
    for first, other, third in itertools.product(waits, waits, waits[:6]):
        snapshots = [
            worker("a", [task("t", first), task("u", third)]),
            worker("b", [task("f", other), task("g", third)], [served("a", "b", 0)]),
        ]
        graph = graph_of(snapshots, {"c": NoAnswer(Trouble.GONE, "")})
        for hang in find_hangs(graph, after_s=0.5):
            assert sentence(graph, hang)
            assert len(tree(graph, hang)) >= len(set(hang.nodes))
            assert len(hang.nodes) == len(hang.path) + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, ""), (0.25, "0.2 s"), (41.2, "41 s"), (3000, "50 min"), (90000, "25 h")],
)
def test_durations_are_written_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
