"""Which of the requests that wait go next."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from asyncrpc.serving.batching.machine.fair_queue import FairQueue, QueuedRequest
from tests.inner_state import shares_of

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


class TestOrder:
    def test_requests_of_a_client_are_served_in_order(self, line: Line) -> None:
        for name in "abc":
            line.add(name)
        assert line.take(2) == "ab"
        line.add("d")
        assert line.all() == "cd"

    def test_clients_take_turns_regardless_of_arrival(self, line: Line) -> None:
        for name in "AAAAAA":
            line.add(name, client=1)
        for name in "bb":
            line.add(name, client=2)
        line.add("c", client=3)
        assert line.take(9) == "AbcAbAAAA"

    def test_client_that_came_first_is_served_first(self, line: Line) -> None:
        line.add("b", client=2)
        line.add("a", client=1)
        assert line.all() == "ba"

    def test_large_request_counts_for_as_much(self, line: Line) -> None:
        for name in "AAA":
            line.add(name, client=1, cost=1.0)
        for name in "bbbbbb":
            line.add(name, client=2, cost=0.5)
        assert line.take(9) == "AbbAbbAbb"

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


class TestPriority:
    def test_request_of_higher_priority_goes_first(self, line: Line) -> None:
        line.add("a")
        line.add("B", priority=1)
        line.add("c")
        line.add("D", priority=2)
        assert line.all() == "DBac"

    def test_priority_is_a_head_start_in_time(self, line: Line) -> None:
        line.add("a")
        line.now_s = 0.5
        line.add("B", priority=1)
        line.now_s = 1.5
        line.add("C", priority=1)
        line.add("D", priority=2)
        assert line.all() == "BDaC"

    def test_batch_takes_from_several_priorities(self, line: Line) -> None:
        line.add("a")
        line.add("B", priority=1)
        line.add("c")
        assert line.take(2) == "Ba"

    def test_clients_share_equally_within_a_priority_only(self, line: Line) -> None:
        for name in "AAA":
            line.add(name, client=1, priority=1)
        for name in "aa":
            line.add(name, client=1)
        for name in "bb":
            line.add(name, client=2)
        assert line.all() == "AAAabab"


class TestBuckets:
    def test_batch_contains_a_single_bucket(self, line: Line) -> None:
        line.add("a", bucket="x")
        line.add("b", bucket="y")
        line.add("c", bucket="x")
        assert line.queue.leader(["x", "y"]) == "x"
        assert line.take(3, bucket="x") == "ac"
        assert list(line.queue.buckets) == ["y"]
        assert line.queue.leader(["y"]) == "y"

    def test_next_bucket_belongs_to_client_with_least_share(self, line: Line) -> None:
        for name in "AAAA":
            line.add(name, client=1, bucket="x")
        line.add("b", client=2, bucket="y")
        assert line.take(1, bucket=line.queue.leader(["x", "y"])) == "A"
        assert line.queue.leader(["x", "y"]) == "y"

    def test_next_bucket_has_the_highest_priority(self, line: Line) -> None:
        line.add("a", bucket="x")
        line.add("B", bucket="y", priority=1)
        assert line.queue.leader(["x", "y"]) == "y"
        assert line.queue.leader(["x"]) == "x"

    def test_bucket_reports_its_count_size_and_oldest_time(self, line: Line) -> None:
        line.add("a", bucket="x", size=3)
        line.now_s = 2.0
        line.add("b", bucket="x", size=4, priority=5)
        line.add("c", bucket="y", size=5)
        assert line.queue.waiting_in("x") == (2, 7, 0.0)
        assert line.queue.waiting_in("y") == (1, 5, 2.0)


class TestSize:
    def test_batch_size_is_limited(self, line: Line) -> None:
        for name in "abc":
            line.add(name, size=4)
        assert line.take(3, size=8) == "ab"

    def test_large_request_holds_back_later_ones(self, line: Line) -> None:
        line.add("a", size=9)
        line.add("b", size=1)
        assert line.take(3, size=8) == ""
        assert line.take(3, size=9) == "a"
        assert line.take(3, size=0) == ""
        assert line.take(3, size=1) == "b"

    def test_held_back_request_is_not_charged(self, line: Line) -> None:
        line.add("A", client=1, size=9)
        line.add("b", client=2, size=1)
        assert line.take(3, size=8) == ""
        assert line.take(3, size=10) == "Ab"


class TestRoom:
    def test_requests_ahead_of_a_new_one_are_counted(self, line: Line) -> None:
        queue = line.queue
        assert queue.ahead_of(0, "b") == 0
        for _ in range(10):
            line.add("A", client="a")
        assert queue.ahead_of(0, "a") == 10
        assert queue.ahead_of(0, "b") == 1  # the first of a's, at most
        line.add("b", client="b")
        assert queue.ahead_of(0, "b") == 3
        assert queue.ahead_of(1, "b") == 0
        line.add("P", client="c", priority=1)
        assert queue.ahead_of(0, "a") == 12
        assert queue.ahead_of(-1, "a") == 12

    def test_client_with_most_requests_is_evicted(self, line: Line) -> None:
        queue = line.queue
        assert queue.to_evict(0, "a") is None
        added = [line.add(name, client="a") for name in "xyz"]
        line.add("b", client="b")
        assert queue.to_evict(0, "a") is None
        assert queue.to_evict(0, "c") is added[-1]
        assert queue.to_evict(0, "b") is added[-1]
        line.add("b", client="b")
        assert queue.to_evict(0, "b") is None, "it has its share already"

    def test_eviction_takes_the_last_request_of_all_buckets(self, line: Line) -> None:
        line.add("x", client="a", bucket=1)
        last = line.add("y", client="a", bucket=2)
        line.add("z", client="b", bucket=1)
        assert line.queue.to_evict(0, "c") is last

    def test_oldest_request_is_evicted_unless_it_is_more_important(
        self, line: Line
    ) -> None:
        queue = line.queue
        assert queue.to_evict(0, "a", oldest=True) is None
        first, *_ = [line.add(name, client="a", bucket=name) for name in "xyz"]
        other = line.add("b", client="b")
        assert queue.to_evict(0, "a", oldest=True) is first
        assert queue.to_evict(0, "b", oldest=True) is first
        assert queue.to_evict(0, "c", oldest=True) is first
        assert queue.to_evict(-1, "a", oldest=True) is None
        line.add("b", client="b")
        assert queue.to_evict(0, "b", oldest=True) is other, "it has its share"

    def test_less_important_request_is_evicted(self, line: Line) -> None:
        line.add("a")
        low = line.add("b")
        line.add("C", priority=1)
        assert line.queue.to_evict(1, None) is low
        assert line.queue.to_evict(0, None) is None
        assert line.queue.to_evict(-1, None) is None


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
