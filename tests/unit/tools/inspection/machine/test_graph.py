"""Who waits for whom over several workers, who can never go on, and who is at fault."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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
    Actor,
    ActorKind,
    CallKey,
    NoAnswer,
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
) -> Actor:
    frames = (StackFrame(name, "/app/train.py", 7),)
    return Actor(kind, name, name, frames, wait, is_internal)


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
    actors: Sequence[Actor],
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


class TestWays:
    def test_waiting_call_leads_to_its_callee(self) -> None:
        event = Wait(WaitKind.EVENT, "Event `go`", 4.0)
        snapshots = [
            worker("a", [task("train", call("a", "b"))]),
            worker("b", [task("f", event)], [served("a", "b", 0)]),
        ]
        assert the_sentence(snapshots) == (
            "a task `train` waits 5.0 s for b `f`, which waits for Event `go` "
            "(train.py:7 in f)"
        )

    def test_cyclic_wait_is_certain(self) -> None:
        snapshots = [
            worker("a", [task("train", call("a", "b"))]),
            worker(
                "b",
                [task("f", lock(1)), task("evict", lock(0))],
                [served("a", "b", 0)],
            ),
        ]
        hang = the_only(snapshots)
        assert hang.is_cycle
        assert hang.is_certain
        assert the_sentence(snapshots).endswith(
            "which waits for Lock `table` held by b task `f`: a cycle, which nothing "
            "can end"
        )

    def test_unserved_call_is_named_in_the_wait(self) -> None:
        snapshots = [
            worker("a", [task("train", call("a", "b"))]),
            worker("b", [], [served("a", "b", NO_ACTOR)]),
        ]
        assert the_sentence(snapshots).endswith(
            "b `f`, which waits for a thread of its pool"
        )

    def test_wait_for_an_unmade_value_leads_to_its_call(self) -> None:
        fetch = served("a", "b", NO_ACTOR)._replace(function="", needs="v")
        making = served("a", "b", 0, 2)._replace(makes="v")
        event = Wait(WaitKind.EVENT, "Event `go`", 4.0)
        snapshots = [
            worker("a", [task("train", call("a", "b"))]),
            worker("b", [task("make", event)], [fetch, making]),
        ]
        assert "a value of b, which waits for Event `go`" in the_sentence(snapshots)

    def test_task_group_wait_leads_to_its_tasks(self) -> None:
        both = Wait(WaitKind.TASKS, "2 tasks", 5.0, (1, 2))
        snapshots = [
            worker(
                "a",
                [
                    task("train", both),
                    task("reader", RUNS),
                    task("writer", Wait(WaitKind.CONDITION, "Condition `go`", 5.0)),
                ],
            )
        ]
        assert "s for task `writer`, which waits for Condition" in the_sentence(
            snapshots
        )

    def test_stream_producer_waits_for_its_consumer(self) -> None:
        of = key("a", "b")
        credit = Wait(WaitKind.CREDIT, "room at the consumer", 5.0, call=of)
        stream = Wait(WaitKind.STREAM, "`f` on 'b'", 5.0, call=of)
        snapshots = [
            worker("a", [task("read", stream)]),
            worker("b", [task("f", credit)], [served("a", "b", 0)]),
        ]
        graph = graph_of(snapshots)
        assert graph.edges[Node("b", 0)][0].to == Node("a", 0)
        assert stuck(graph) == {Node("a", 0), Node("b", 0)}

    def test_wait_for_an_absent_member_names_it(self) -> None:
        barrier = Wait(WaitKind.ROUND, "barrier 3", 5.0, members=("a", "b", "c"))
        snapshots = [
            worker("a", [task("train", barrier)]),
            worker("b", [task("train", barrier)]),
            worker("c", [task("train", Wait(WaitKind.SLEEP, "sleep(9)", 9.0))]),
        ]
        assert the_sentence(snapshots) == (
            "a task `train` waits 5.0 s for barrier 3, to which c has not come: c task "
            "`train`, which is in sleep(9) (train.py:7 in train)"
        )

    def test_first_of_several_absent_members_is_named(self) -> None:
        barrier = Wait(WaitKind.ROUND, "barrier 3", 5.0, members=("a", "b", "c"))
        rests = Wait(WaitKind.EVENT, "Event `e`", 9.0, is_sure=False, is_closed=True)
        snapshots = [
            worker("a", [task("train", barrier)]),
            worker("b", [task("main", rests)]),
            worker("c", []),
        ]
        hang = the_only(snapshots)
        assert not hang.is_certain  # another task of `b` may come
        assert "to which b and 1 more have not come: b task `main`" in the_sentence(
            snapshots
        )

    def test_members_in_two_collectives_wait_for_each_other(self) -> None:
        left = Wait(WaitKind.COLLECTIVE, "all_reduce 1 of 'l'", 5.0, members=("a", "b"))
        right = left._replace(what="all_reduce 1 of 'r'")
        snapshots = [worker("a", [task("t", left)]), worker("b", [task("t", right)])]
        hang = the_only(snapshots)
        assert hang.is_cycle
        assert hang.is_certain


class TestTroubles:
    def test_silent_worker_is_reported_as_stuck(self) -> None:
        snapshots = [worker("a", [task("train", call("a", "b"))])]
        assert the_sentence(snapshots, b=NoAnswer(Trouble.STOPPED, "process 7")) == (
            "a task `train` waits 5.0 s for b, which is stuck: its process is "
            "stopped, process 7"
        )

    def test_blocked_loop_is_reported(self) -> None:
        sleeping = task("Main", SLEEPS, kind=ActorKind.THREAD)
        snapshots = [
            worker("a", [task("train", call("a", "b"))]),
            worker(
                "b",
                [task("f", RUNS), sleeping],
                [served("a", "b", 0)],
                blocked_for_s=9.0,
                loop_actor=1,
            ),
        ]
        assert "which runs `time.sleep(9)` (train.py:7 in Main)" in the_sentence(
            snapshots
        )

    def test_call_unread_by_a_blocked_loop_leads_to_the_loop(self) -> None:
        sleeping = task("Main", SLEEPS, kind=ActorKind.THREAD)
        snapshots = [
            worker("a", [task("train", call("a", "b"))]),
            worker("b", [sleeping], blocked_for_s=9.0, loop_actor=0),
        ]
        assert "which runs `time.sleep(9)`" in the_sentence(snapshots)


class TestRest:
    @pytest.mark.parametrize(
        "wait",
        [
            Wait(WaitKind.EVENT, "Event `stop`", 3600.0, is_sure=False, is_closed=True),
            Wait(WaitKind.ITEM, "an item", 3600.0),
            Wait(WaitKind.SLEEP, "sleep(9)", 3600.0),
            Wait(WaitKind.SOCKET, "", 3600.0),
            RUNS,
        ],
        ids=lambda wait: wait.kind.name,
    )
    def test_open_wait_is_not_a_fault(self, wait: Wait) -> None:
        assert find_hangs(graph_of([worker("a", [task("t", wait)])]), after_s=1.0) == []

    def test_short_call_is_not_a_fault(self) -> None:
        snapshots = [
            worker("a", [task("train", call("a", "b", for_s=0.5))]),
            worker("b", [task("f", RUNS)], [served("a", "b", 0)]),
        ]
        assert find_hangs(graph_of(snapshots), after_s=1.0) == []

    def test_task_of_asyncrpc_is_not_a_fault(self) -> None:
        actors = [task("pump", lock(0), is_internal=True)]
        assert find_hangs(graph_of([worker("a", actors)]), after_s=1.0) == []

    def test_lost_notify_is_a_fault_although_no_task_waits_for_it(self) -> None:
        wait = Wait(
            WaitKind.CONDITION, "Condition `c`", 9.0, is_sure=False, is_closed=True
        )
        assert find_hangs(graph_of([worker("a", [task("t", wait)])]), after_s=1.0)


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


class TestWhoGoesOn:
    """Who waits for others that go on is not named, however long it has waited."""

    def test_main_task_may_wait_for_working_tasks(self) -> None:
        main = task("main", Wait(WaitKind.TASKS, "a task", 500.0, (1,)))
        snapshots = [
            worker("a", [main, task("work", call("a", "b", for_s=0.1))]),
            worker("b", [task("f", RUNS)], [served("a", "b", 0)]),
        ]
        assert find_hangs(graph_of(snapshots), after_s=3.0) == []

    def test_main_task_may_wait_for_a_server_at_rest(self) -> None:
        main = task("main", Wait(WaitKind.TASKS, "2 tasks", 500.0, (1, 2)))
        serve = task("serve", Wait(WaitKind.EVENT, "Event `stop`", 500.0))
        snapshots = [worker("a", [main, serve, task("work", RUNS)])]
        assert find_hangs(graph_of(snapshots), after_s=3.0) == []

    def test_long_call_with_changing_waits_is_not_a_fault(self) -> None:
        snapshots = [
            worker("a", [task("train", call("a", "b", for_s=500.0))]),
            worker(
                "b",
                [task("f", Wait(WaitKind.EVENT, "Event `next`", 0.5))],
                [served("a", "b", 0)],
            ),
        ]
        assert find_hangs(graph_of(snapshots), after_s=3.0) == []

    def test_thread_that_has_just_begun_is_not_a_fault(self) -> None:
        thread = task("compute", SLEEPS, kind=ActorKind.THREAD)
        waiter = task(
            "work", Wait(WaitKind.THREADS, "a function in a thread", 0.5, (1,))
        )
        main = task("main", Wait(WaitKind.TASKS, "a task", 500.0, (0,)))
        snapshots = [worker("a", [waiter, thread, main])]
        assert find_hangs(graph_of(snapshots), after_s=3.0) == []

    def test_thread_in_a_long_function_may_hang(self) -> None:
        thread = task("f", SLEEPS, kind=ActorKind.THREAD)
        snapshots = [
            worker("a", [task("train", call("a", "b", for_s=500.0))]),
            worker("b", [thread], [served("a", "b", 0)]),
        ]
        assert len(find_hangs(graph_of(snapshots), after_s=3.0)) == 1

    def test_briefly_blocked_loop_is_not_a_fault(self) -> None:
        loop = task("f", SLEEPS, kind=ActorKind.THREAD)
        for blocked_for_s, count in ((0.3, 0), (30.0, 1)):
            snapshots = [
                worker("a", [task("train", call("a", "b", for_s=500.0))]),
                worker("b", [loop], loop_actor=0, blocked_for_s=blocked_for_s),
            ]
            assert len(find_hangs(graph_of(snapshots), after_s=3.0)) == count

    def test_rounds_seen_at_different_moments_are_not_a_fault(self) -> None:
        def comes(number: int, for_s: float) -> Wait:
            return Wait(WaitKind.ROUND, f"barrier {number}", for_s, members=("a", "b"))

        for for_s, count in ((0.3, 0), (2.5, 1)):
            snapshots = [
                worker("a", [task("train", comes(7, for_s))]),
                worker("b", [task("train", comes(8, for_s))]),
            ]
            assert len(find_hangs(graph_of(snapshots), after_s=3.0)) == count


class TestWhatIsDoneForOthers:
    """A turn leads to who does what has it; a collective to who will come to it."""

    def test_turn_leads_to_the_step_that_has_it(self) -> None:
        turn = Wait(WaitKind.TURN, "its turn to change parameters", 5.0, needs=("s",))
        commit = task("commit", call("b", "c"))
        snapshots = [
            worker("a", [task("step", turn)]),
            worker("b", [commit._replace(does=("s",))]),
            worker(
                "c", [task("f", Wait(WaitKind.EVENT, "", 5.0))], [served("b", "c", 0)]
            ),
        ]
        assert the_sentence(snapshots).startswith(
            "a task `step` waits 5.0 s for its turn to change parameters held by b "
            "task `commit`, which waits for c `f`, which waits for"
        )

    def test_task_that_will_join_the_collective_is_named(self) -> None:
        reduce = Wait(
            WaitKind.COLLECTIVE, "all_reduce 1", 5.0, members=("a", "b"), needs=("g",)
        )
        rest = task("rest", Wait(WaitKind.EVENT, "Event `rest`", 900.0))
        filling = task("fill", Wait(WaitKind.EVENT, "Event `full`", 5.0))
        snapshots = [
            worker("a", [task("train", reduce)]),
            worker("b", [rest, filling._replace(does=("g",), is_internal=True)]),
        ]
        assert the_sentence(snapshots) == (
            "a task `train` waits 5.0 s for all_reduce 1, to which b has not come: b "
            "task `fill`, which waits for Event `full` (train.py:7 in fill)"
        )

    def test_call_without_a_thread_leads_to_the_busy_threads(self) -> None:
        busy = task("asyncrpc-b-1", SLEEPS, kind=ActorKind.THREAD)
        snapshots = [
            worker("a", [task("train", call("a", "b"))]),
            worker("b", [busy], [served("a", "b", NO_ACTOR)]),
        ]
        assert the_sentence(snapshots) == (
            "a task `train` waits 5.0 s for b `f`, which waits for a thread of its "
            "pool: thread `asyncrpc-b-1`, which runs `time.sleep(9)` (train.py:7 in "
            "asyncrpc-b-1)"
        )

    def test_large_request_leads_to_the_calls_that_hold_the_room(self) -> None:
        room = call("a", "b")._replace(
            kind=WaitKind.INBOUND, what="room for `f` on 'b'"
        )
        keeps = task("keep", Wait(WaitKind.EVENT, "Event `go`", 5.0))
        kept = served("c", "b", 0)._replace(holds_bytes=600)
        snapshots = [worker("a", [task("train", room)]), worker("b", [keeps], [kept])]
        assert the_sentence(snapshots) == (
            "a task `train` waits 5.0 s for room for `f` on 'b' held by b task `keep`, "
            "which waits for Event `go` (train.py:7 in keep)"
        )

    def test_pass_leads_to_all_its_requests(self) -> None:
        waits = Wait(
            WaitKind.BACKWARD,
            "its backward pass",
            5.0,
            calls=(key("a", "b"), key("a", "c", 2)),
        )
        advance = served("a", "b", 0)._replace(function="autograd.advance")
        snapshots = [
            worker("a", [task("train", waits)]),
            worker("b", [task("g", Wait(WaitKind.EVENT, "", 5.0))], [advance]),
            worker("c", []),
        ]
        assert the_sentence(snapshots).startswith(
            "a task `train` waits 5.0 s for the backward pass on b, which waits for"
        )
