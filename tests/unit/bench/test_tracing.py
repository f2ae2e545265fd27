"""Marks and what is made of them: calls, stages, and a clock that is not their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch

from tests.bench import tracing, training_path
from tests.bench import training as t
from tests.bench.tracing import (
    CALLEE_PROBES,
    CALLER_PROBES,
    PLACE_BITS,
    Place,
    Probe,
    cut,
    passages,
    stages,
)

WHOLE: Mapping[Place, int] = {
    Place.BEGIN: 0,
    Place.WRITE: 10,
    Place.WRITTEN: 30,
    Place.READ: 50,
}


@pytest.fixture(autouse=True)
def _no_marks() -> Iterator[None]:
    yield
    tracing.marks.clear()


def marks_of(call: Mapping[Place, int], at_ns: int = 0) -> list[int]:
    whole = {**call, Place.END: 100}
    return [(at_ns + time_ns) << PLACE_BITS | place for place, time_ns in whole.items()]


def test_marks_of_both_processes_become_calls_and_stages() -> None:
    marks = marks_of(WHOLE, 5_000) + marks_of(WHOLE, 1_000)
    spans = stages(passages(marks))
    assert spans[Place.WRITTEN] == pytest.approx([0.02, 0.02])
    assert spans[Place.END] == pytest.approx([0.05, 0.05])
    assert sum(times[0] for times in spans.values()) == pytest.approx(0.1)


def test_late_write_ends_when_the_peer_has_read() -> None:
    spans = stages(passages(marks_of({**WHOLE, Place.WRITTEN: 70})))
    assert spans[Place.WRITTEN] == pytest.approx([0.04])
    assert spans[Place.READ] == pytest.approx([0.0])


def test_call_with_a_repeated_mark_is_left_out() -> None:
    twice = [*marks_of(WHOLE, 3_000), 3_060 << PLACE_BITS | Place.READ]
    marks = marks_of(WHOLE, 1_000) + twice + marks_of(WHOLE, 5_000)
    assert len(passages(marks)) == 2


def test_marks_between_calls_belong_to_no_call() -> None:
    between = [2_000 << PLACE_BITS | Place.READ]
    assert len(passages(marks_of(WHOLE) + between + marks_of(WHOLE, 3_000))) == 2
    assert passages([]) == []
    assert stages([]) == {}


def test_missing_place_is_part_of_the_next_stage() -> None:
    shorter: Mapping[Place, int] = {
        place: ns for place, ns in WHOLE.items() if place is not Place.WRITTEN
    }
    assert stages(passages(marks_of(shorter)))[Place.READ] == pytest.approx([0.04])


def test_traced_function_returns_its_result_and_marks_both_ends() -> None:
    assert tracing.traced(max, Place.WRITE, Place.WRITTEN)(1, 2) == 2
    places = [mark & ((1 << PLACE_BITS) - 1) for mark in tracing.marks]
    assert places == [Place.WRITE, Place.WRITTEN]


def test_mark_cost_is_positive_and_leaves_no_marks() -> None:
    assert tracing.mark_cost_ns() > 0
    assert tracing.marks == []


def test_probe_of_a_missing_method_does_not_attach() -> None:
    gone = Probe("asyncrpc.core.links.link", "Link", "gone", Place.READ, None)
    assert not tracing.attach(gone)


@pytest.mark.parametrize("probe", CALLER_PROBES + CALLEE_PROBES)
def test_every_probe_attaches_to_its_method(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename in the runtime must not make a stage vanish without a word."""
    owner = getattr(__import__(probe.module, fromlist=[probe.owner]), probe.owner)
    monkeypatch.setattr(owner, probe.method, getattr(owner, probe.method))
    assert tracing.attach(probe)


def test_marks_of_a_training_step_become_stages_in_its_order() -> None:
    places = training_path.Place
    times = {place: 1_000 * number for number, place in enumerate(places)}
    marks = [at << PLACE_BITS | place for place, at in times.items()]
    (step,) = cut(reversed(marks), places)
    assert step == times
    assert set(stages([step])) == set(places) - {places.BEGIN}
    assert {time_us for (time_us,) in stages([step]).values()} == {1.0}


def test_gradient_passes_the_marks_of_a_layer() -> None:
    """From its result, then to its weight."""
    rows = torch.ones(t.BATCH, t.FEATURES)
    training_path.TracedLayer()(rows).sum().backward()
    places = training_path.Place
    marked_places = [mark & ((1 << PLACE_BITS) - 1) for mark in tracing.taken_marks()]
    assert marked_places == [
        places.FORWARD,
        places.FORWARDED,
        places.ARRIVED,
        places.COMPUTED,
    ]
    assert tracing.taken_marks() == []
