"""What torch's own analysis says of the dumps: it is called as `torchfrtrace` does."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig

from asyncrpc.tools.inspection.collective_records import (
    CLOSED,
    UNDER_WAY,
    CollectiveHistory,
    KnownGroup,
    NotedCollective,
)
from asyncrpc.tools.inspection.records import StackFrame
from asyncrpc.tools.inspection.torch_format import (
    began_before,
    global_ranks,
    torch_dumps,
)

NAMES = ("a", "b", "c")
FLOAT = "torch.float32"
FRAME = StackFrame("train", "train.py", 7)


def noted(
    number: int,
    operation: str = "all_reduce",
    *,
    outcome: str = "ok",
    group: int = 0,
    shape: tuple[int, ...] | None = (4,),
    dtype: str = FLOAT,
) -> NotedCollective:
    ended_ns = UNDER_WAY if not outcome else 1000 + number
    frames = () if outcome else (FRAME,)
    began_ns = 100 + number
    return NotedCollective(
        group, number, operation, dtype, shape, began_ns, ended_ns, outcome, frames
    )


def history(
    name: str,
    collectives: Sequence[NotedCollective],
    *,
    begun: int | None = None,
    is_whole: bool = True,
    groups: Sequence[KnownGroup] | None = None,
) -> CollectiveHistory:
    last = max((collective.number for collective in collectives), default=-1) + 1
    if groups is None:
        groups = [
            KnownGroup(5, "a group of 3", NAMES, last if begun is None else begun)
        ]
    return CollectiveHistory(
        name, NAMES.index(name), 1, tuple(groups), tuple(collectives), is_whole
    )


RANKS = {"a": 0, "b": 1, "c": 2}


class Analysis:
    """What torch's analysis says."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __call__(self, *histories: CollectiveHistory, incomplete: bool = False) -> str:
        self._caplog.clear()
        dumps = torch_dumps(histories, RANKS)
        flags = ["--allow-incomplete-ranks"] if incomplete else []
        arguments: Any = JobConfig().parse_args(flags)
        details = {f"r{rank}": copy.deepcopy(dump) for rank, dump in dumps.items()}
        with self._caplog.at_level(logging.INFO, logger="Flight Recorder"):
            build_db(details, arguments, next(iter(dumps.values()))["version"])
        return "\n".join(record.getMessage() for record in self._caplog.records)


@pytest.fixture
def analyse(caplog: pytest.LogCaptureFixture) -> Analysis:
    return Analysis(caplog)


# Every operation that there is, with what descriptors have of it.
OPERATIONS = [
    noted(0, "open", shape=None, dtype=""),
    noted(1, "barrier", shape=None, dtype=""),
    noted(2, "all_reduce"),
    noted(3, "reduce"),
    noted(4, "broadcast", shape=(2, 3), dtype="torch.int64"),
    noted(5, "all_gather", shape=None),
    noted(6, "gather", shape=None),
    noted(7, "scatter", shape=None, dtype=""),
    noted(8, "reduce_scatter", shape=(2, 2, 2)),
    noted(9, "reduce_scatter", shape=(1, 2, 3)),
    noted(10, "all_to_all", shape=None),
    noted(11, "empty", shape=(4096,), dtype=""),
    noted(12, "all_reduce", shape=(), dtype="torch.bfloat16"),
]


class TestWhatTorchSays:
    def test_healthy_group_has_no_report(self, analyse: Analysis) -> None:
        assert analyse(*(history(name, OPERATIONS) for name in NAMES)) == ""

    def test_unfinished_collective_with_all_ranks_has_no_report(
        self, analyse: Analysis
    ) -> None:
        under_way = [
            operation._replace(ended_ns=UNDER_WAY, outcome="")
            for operation in OPERATIONS
        ]
        assert analyse(*(history(name, under_way) for name in NAMES)) == ""

    def test_missing_rank_and_waiting_frames_are_reported(
        self, analyse: Analysis
    ) -> None:
        waiting = [noted(0), noted(1, "barrier", shape=None, dtype="", outcome="")]
        text = analyse(
            history("a", waiting), history("b", [noted(0)]), history("c", waiting)
        )
        assert "Not all ranks joining collective, sequence number: 1" in text
        assert "missing ranks: {1}" in text
        assert "collective: gloo:barrier" in text
        assert "a group of 3" in text
        assert "train at train.py:7" in text

    @pytest.mark.parametrize(
        ("other", "wanted"),
        [
            (
                noted(1, "all_gather", shape=None, outcome="CollectiveError"),
                "COLLECTIVE_TYPE_MISMATCH, Expected collective type: 'all_reduce'",
            ),
            (
                noted(1, shape=(5,), outcome="CollectiveError"),
                "SIZE_OR_SYNTAX_MISMATCH, Expected input sizes: '[[4]]' does not match",
            ),
            (
                noted(1, dtype="torch.int64", outcome="CollectiveError"),
                "COLLECTIVE_DTYPE_MISMATCH",
            ),
            (noted(1), "COLLECTIVE_STATE_MISMATCH"),
        ],
        ids=["type", "shape", "dtype", "state"],
    )
    def test_mismatched_collective_names_the_culprit(
        self, analyse: Analysis, other: NotedCollective, wanted: str
    ) -> None:
        mine = [noted(0), noted(1, outcome="CollectiveError")]
        text = analyse(
            history("a", mine), history("b", mine), history("c", [noted(0), other])
        )
        assert "Collective sequence number: 1 has errors" in text
        assert f"Culprit rank 2; Error type: {wanted}" in text

    def test_missing_dump_is_an_error(self, analyse: Analysis) -> None:
        waiting = [noted(0), noted(1, outcome="RankLostError")]
        there = [history(name, waiting) for name in "ab"]
        with pytest.raises(
            AssertionError, match=r"Missing dump files from ranks \{2\}"
        ):
            analyse(*there)
        assert "we missed FR dumps from ranks ({2})" in analyse(*there, incomplete=True)


class TestWhatIsForgotten:
    def test_forgotten_collective_is_not_reported_as_missing(
        self, analyse: Analysis
    ) -> None:
        all_ = [noted(number) for number in range(20)]
        assert (
            analyse(
                history("a", all_),
                history("b", all_[7:], is_whole=False),
                history("c", all_[12:], is_whole=False),
            )
            == ""
        )

    def test_lagging_rank_is_reported_despite_forgotten_collectives(
        self, analyse: Analysis
    ) -> None:
        all_ = [noted(number) for number in range(20)]
        waiting = [*all_[12:], noted(20, outcome="")]
        text = analyse(
            history("a", waiting, is_whole=False),
            history("b", waiting, is_whole=False),
            history("c", all_[15:], is_whole=False),
        )
        assert "sequence number: 20" in text
        assert "missing ranks: {2}" in text

    def test_gap_ends_the_remembered_collectives(self) -> None:
        whole = [noted(number) for number in range(10)]
        with_gap = [operation for operation in whole if operation.number != 6]
        dumps = torch_dumps(
            [history("a", whole), history("b", with_gap, is_whole=False)], RANKS
        )
        assert [entry["collective_seq_id"] for entry in dumps[0]["entries"]] == [
            7,
            8,
            9,
        ]
        assert [entry["record_id"] for entry in dumps[0]["entries"]] == [0, 1, 2]

    def test_group_forgotten_or_never_made_by_a_rank_is_left_out(self) -> None:
        mine = [noted(0), noted(1, outcome="")]
        others = history("b", [], is_whole=False, groups=[])
        dumps = torch_dumps([history("a", mine), others], RANKS)
        assert [entry["collective_seq_id"] for entry in dumps[0]["entries"]] == [1]

    def test_closed_group_ends_with_its_last_collective(self) -> None:
        group = KnownGroup(5, "a group of 3", NAMES, CLOSED)
        mine = history("a", [noted(3), noted(4)], is_whole=False, groups=[group])
        dumps = torch_dumps([mine, history("b", [noted(n) for n in range(5)])], RANKS)
        assert [entry["collective_seq_id"] for entry in dumps[1]["entries"]] == [3, 4]


class TestRanks:
    def test_global_ranks_are_those_of_the_workers(self) -> None:
        histories = [history("a", [noted(0)])]
        assert global_ranks({"c": 0, "a": 7, "b": 3, "watcher": -1}, histories) == {
            "c": 0,
            "a": 7,
            "b": 3,
        }

    @pytest.mark.parametrize(
        "known", [{"a": -1, "b": -1}, {"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 1}]
    )
    def test_global_ranks_follow_the_names_without_known_ranks(
        self, known: dict[str, int]
    ) -> None:
        assert global_ranks(known, [history("a", [noted(0)])]) == RANKS

    def test_dump_names_the_ranks_of_a_group(self) -> None:
        group = KnownGroup(5, "group 'left' of 2", ("c", "a"), 1)
        left = history("c", [noted(0)], groups=[group])
        (dump,) = torch_dumps([left], RANKS).values()
        assert dump["rank"] == 2
        assert dump["pg_config"] == {
            "0000000000000005": {
                "name": "0000000000000005",
                "desc": "group 'left' of 2",
                "ranks": "[2, 0]",
            }
        }

    def test_worker_without_a_rank_has_no_dump(self) -> None:
        watcher = CollectiveHistory("watcher", -1, 1, (), (), is_whole=True)
        assert torch_dumps([watcher], RANKS) == {}


def test_collective_begun_between_two_looks_is_left_out() -> None:
    earlier = [history("a", [noted(0)]), history("b", [noted(0), noted(1, outcome="")])]
    later = [
        history("a", [noted(0), noted(1)]),
        history("b", [noted(0), noted(1), noted(2, outcome="")]),
    ]
    numbers = [
        [collective.number for collective in each.collectives]
        for each in began_before(later, earlier)
    ]
    assert numbers == [[0, 1], [0, 1]]


def test_dump_entry_has_the_fields_that_torch_shows() -> None:
    done, waiting = noted(3, dtype="torch.float16"), noted(4, outcome="")
    (dump,) = torch_dumps([history("a", [done, waiting])], RANKS).values()
    first, second = dump["entries"]
    assert first["input_sizes"] == first["output_sizes"] == [[4]]
    assert first["input_dtypes"] == first["output_dtypes"] == ["Half"]
    assert first["state"] == "completed"
    assert first["retired"]
    assert first["time_discovered_completed_ns"] == 1003
    assert first["frames"] == []
    assert second["state"] == "started"
    assert not second["retired"]
    assert second["time_discovered_completed_ns"] is None
    assert second["frames"] == [{"name": "train", "filename": "train.py", "line": 7}]
    assert dump["pg_status"]["0"] == {
        "last_enqueued_collective": 4,
        "last_started_collective": 4,
        "last_completed_collective": 3,
    }
