"""Which of the requests that wait go next."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from asyncrpc.serving.batching.machine.fair_queue import FairQueue, QueuedRequest
from tests.inner_state import shares_of
from tests.unit.stories import Actions, Words, cases

STEP_S = 1.0


class Line:
    """A queue, with requests that are known by their names."""

    def __init__(self) -> None:
        self.queue: FairQueue[str] = FairQueue(STEP_S)
        self.all_of: list[QueuedRequest[str]] = []
        self.now_s = 0.0

    def add(self, name: str, client: Hashable = None, **options: Any) -> Any:
        request = QueuedRequest(name, self.now_s, client=client, **options)
        self.queue.add(request)
        self.all_of.append(request)
        return request

    def take(self, count: int, size: int | None = None, bucket: Any = None) -> str:
        return "".join(
            str(request.subject) for request in self.queue.take(bucket, count, size)
        )

    def all(self) -> str:
        taken = ""
        while len(self.queue):
            taken += self.take(1, bucket=self.queue.leader(self.queue.buckets))
        return taken


@pytest.fixture
def line() -> Line:
    return Line()


STORIES = """
requests of a client are served in order:
    add abc; take 2 = ab; add d; all = cd
clients take turns regardless of arrival:
    add AAAAAA client:1; add bb client:2; add c client:3; take 9 = AbcAbAAAA
client that came first is served first:
    add b client:2; add a client:1; all = ba
large request counts for as much:
    add AAA client:1 cost:1.0; add bbbbbb client:2 cost:0.5; take 9 = AbbAbbAbb
request of higher priority goes first:
    add a; add B priority:1; add c; add D priority:2; all = DBac
priority is a head start in time:
    add a; at 0.5; add B priority:1
    at 1.5; add C priority:1; add D priority:2; all = BDaC
batch takes from several priorities:
    add a; add B priority:1; add c; take 2 = Ba
clients share equally within a priority only:
    add AAA client:1 priority:1; add aa client:1; add bb client:2; all = AAAabab
batch contains a single bucket:
    add a bucket:x; add b bucket:y; add c bucket:x; leader xy = x
    take 3 bucket:x = ac; buckets = y; leader y = y
next bucket belongs to the client with the least share:
    add AAAA client:1 bucket:x; add b client:2 bucket:y; leader xy = x
    take 1 bucket:x = A; leader xy = y
next bucket has the highest priority:
    add a bucket:x; add B bucket:y priority:1; leader xy = y; leader x = x
bucket reports its count, size and oldest time:
    add a bucket:x size:3; at 2.0; add b bucket:x size:4 priority:5
    add c bucket:y size:5; waiting x = (2, 7, 0.0); waiting y = (1, 5, 2.0)
batch size is limited:
    add abc size:4; take 3 size:8 = ab
large request holds back later ones:
    add a size:9; add b size:1; take 3 size:8; take 3 size:9 = a
    take 3 size:0; take 3 size:1 = b
held back request is not charged:
    add A client:1 size:9; add b client:2 size:1; take 3 size:8; take 3 size:10 = Ab
requests ahead of a new one are counted:  # of other clients, the first at most
    ahead 0 b = 0; add AAAAAAAAAA client:a; ahead 0 a = 10; ahead 0 b = 1
    add b client:b; ahead 0 b = 3; ahead 1 b = 0
    add P client:c priority:1; ahead 0 a = 12; ahead -1 a = 12
client with most requests is evicted:  # unless the new one has its share already
    evict 0 a = none; add xyz client:a; add b client:b
    evict 0 a = none; evict 0 c = z; evict 0 b = z; add d client:b; evict 0 b = none
eviction takes the last request of all buckets:
    add x client:a bucket:1; add y client:a bucket:2; add z client:b bucket:1
    evict 0 c = y
oldest request is evicted unless it is more important:
    evict 0 a oldest:1 = none
    add x client:a bucket:1; add yz client:a bucket:2; add b client:b
    evict 0 a oldest:1 = x; evict 0 b oldest:1 = x; evict 0 c oldest:1 = x
    evict -1 a oldest:1 = none; add d client:b; evict 0 b oldest:1 = b
less important request is evicted:
    add ab client:c; add C client:c priority:1
    evict 1 c = b; evict 0 c = none; evict -1 c = none
"""


@cases(STORIES)
def test_queue_follows_the_story(line: Line, steps: list[str]) -> None:
    queue = line.queue

    def add(names: str, **options: Any) -> None:
        for name in names:
            line.add(name, **options)

    def evict(priority: int, client: str, oldest: int = 0) -> str:
        evicted = queue.to_evict(priority, client, oldest=bool(oldest))
        return evicted.subject if evicted else "none"

    actions: Actions = {
        "add": add,
        "at": lambda now_s: setattr(line, "now_s", now_s),
        "take": line.take,
        "all": line.all,
        "leader": lambda buckets: str(queue.leader(list(buckets))),
        "buckets": lambda: "".join(map(str, queue.buckets)),
        "waiting": lambda bucket: str(tuple(queue.waiting_in(bucket))),
        "ahead": queue.ahead_of,
        "evict": evict,
    }
    Words().play(steps, actions)


class TestOrder:
    def test_returning_client_has_saved_no_turns(self, line: Line) -> None:
        line.add("b", client=2)
        for _ in range(12):
            line.add("A", client=1)
        assert line.take(9) == "bAAAAAAAA"
        for _ in range(4):
            line.add("b", client=2)
        taken = line.take(8)
        assert sorted(taken[:4]) == ["A", "A", "b", "b"]
        assert taken[:4] != "bbAA"

    def test_client_with_single_requests_gets_its_share_only(self, line: Line) -> None:
        """It comes back at once, each time; two others always wait."""
        for name in "BC" * 30:
            line.add(name, client=name)
        taken = ""
        for _ in range(30):
            if "a" not in [str(request.subject) for request in line.queue]:
                line.add("a", client="a")
            taken += line.take(1)
        counts = {name: taken.count(name) for name in "aBC"}
        assert max(counts.values()) - min(counts.values()) <= 1

    def test_returning_client_still_owes_for_large_requests(self, line: Line) -> None:
        """Its requests are large, and it has one at a time."""
        for _ in range(100):
            line.add("b", client="b", cost=0.125)
        served = {"A": 0.0, "b": 0.0}
        for _ in range(80):
            if "A" not in [str(request.subject) for request in line.queue]:
                line.add("A", client="A")
            served[line.take(1)] += 1.0
        assert abs(served["A"] - served["b"] * 0.125) <= 2.0

    def test_new_clients_do_not_starve_a_waiting_one(self, line: Line) -> None:
        for _ in range(10):
            line.add("A", client="A")
        for serial in range(4):
            line.add("n", client=serial)
        taken = ""
        for serial in range(4, 60):
            taken += line.take(1)
            line.add("n", client=serial)
        assert taken.count("A") >= 5, "of ten that wait, one is A's"
        assert max(map(len, taken.split("A"))) <= 12

    def test_removed_request_costs_its_client_nothing(self, line: Line) -> None:
        for name in "AAAA":
            line.add(name, client=1)
        gone = [line.add("b", client=2) for _ in range(3)]
        line.add("B", client=2)
        for request in gone:
            line.queue.remove(request)
        assert line.take(2) in {"AB", "BA"}

    def test_shares_of_departed_clients_are_forgotten(self, line: Line) -> None:
        line.add("A", client="always")
        for serial in range(500):
            line.add("n", client=serial)
            line.add("A", client="always")
            line.take(2)
        assert len(shares_of(line.queue, 0)) < 30


def test_queue_lists_its_waiting_requests(line: Line) -> None:
    queue = line.queue
    assert queue.oldest is None
    first = line.add("a", client=1, bucket=1, priority=3)
    line.add("b")
    assert queue.oldest is first
    assert (len(queue), first in queue) == (2, True)
    line.queue.remove(line.all_of[0])
    assert [request.subject for request in queue] == ["b"]
    assert first not in queue
    with pytest.raises(KeyError):
        line.queue.remove(line.all_of[0])
