"""Web workers of one host share one model, whoever comes and goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.serving.model_host.conftest import lines_of, until_all_have_ended
from tests.integration.serving.model_host.models import COUNTS
from tests.integration.serving.model_host.web import WebWorker

NewWeb = Callable[[], WebWorker]

ENDS_S = 120.0  # that only a leak reaches
LEAK_KIB = 64 * 1024  # fifty slabs are 800 MiB; what the allocator keeps is less


def test_web_workers_that_come_at_once_share_one_model(
    folder: Path, new_web: NewWeb
) -> None:
    webs = [new_web() for _ in range(4)]
    for web in webs:
        web.begin("enter", ("make_model", {"linger_s": 0.0}))
    for web in webs:
        web.result()
    pids = {web.do("call", ("pid",)) for web in webs}
    assert list(map(str, pids)) == lines_of(folder / "made")
    assert not pids & {web.pid for web in webs}
    for web in webs:
        assert web.do("forward", [0.0, 1.0, 2.0, 3.0]) == [0.0, 2.0, 4.0, 6.0]


def test_model_outlives_its_starter(folder: Path, new_web: NewWeb) -> None:
    first, second = new_web(), new_web()
    first.enter(linger_s=0.0)
    second.enter(linger_s=0.0)
    pid = second.do("call", ("pid",))
    first.kill()
    second.do("until_attached", 1)
    third = new_web()
    third.enter(linger_s=0.0)
    assert third.do("call", ("pid",)) == second.do("call", ("pid",)) == pid
    assert len(lines_of(folder / "made")) == 1


def test_objects_of_the_model_are_frozen_for_the_collector(new_web: NewWeb) -> None:
    """A full collection would go through all of torch, for 0.1 s."""
    web = new_web()
    web.enter(linger_s=0.0)
    assert web.do("call", ("frozen",)) > 10_000


def test_model_starts_though_its_first_starter_is_killed(
    folder: Path, new_web: NewWeb
) -> None:
    """At any point of the start."""
    first = new_web()
    first.begin("enter", ("make_model", {"linger_s": 0.0}))
    lock = folder / "runs" / "models"
    while not list(lock.glob("*/lock")):  # it has begun; nothing tells of it
        pass
    first.kill()
    second = new_web()
    second.enter(linger_s=0.0)
    assert second.do("status")[0] == "ready"


@pytest.mark.slow
def test_the_process_ends_with_its_last_web_worker(
    folder: Path, new_web: NewWeb
) -> None:
    web = new_web()
    web.enter(linger_s=0.0)
    web.do("leave")
    until_all_have_ended(folder)
    web.enter(linger_s=0.0)
    assert len(set(lines_of(folder / "made"))) == 2


@pytest.mark.slow
def test_a_web_worker_that_comes_back_in_time_finds_the_same_process(
    folder: Path, new_web: NewWeb
) -> None:
    web = new_web()
    web.enter(linger_s=3600.0)
    web.do("leave")
    web.enter(linger_s=3600.0)
    assert len(lines_of(folder / "made")) == 1


def test_tensors_go_through_shared_memory(new_web: NewWeb) -> None:
    web = new_web()
    web.enter(linger_s=0.0)
    total, slabs = web.do("send", 16)
    assert total == 16 << 18
    assert slabs == 1


@pytest.mark.slow
def test_model_function_may_be_a_coroutine(new_web: NewWeb) -> None:
    web = new_web()
    web.enter("make_in_coroutine", linger_s=0.0)
    assert web.do("status")[0] == "ready"


def test_batcher_of_the_model_gathers_calls_of_web_workers(
    folder: Path, new_web: NewWeb
) -> None:
    """A call alone would wait for an hour; the context is left at the end."""
    webs = [new_web() for _ in range(3)]
    for web in webs:
        web.enter("make_batched", linger_s=0.0)
    for number, web in enumerate(webs):
        web.begin("call", ("predict", float(number)))
    assert [web.result() for web in webs] == [300.0, 302.0, 304.0]
    for web in webs:
        web.end()
    until_all_have_ended(folder)
    assert (folder / "left").exists()


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_model_survives_killed_web_workers(new_web: NewWeb, kills: int) -> None:
    """Links, tasks, descriptors and references are what they were; memory nearly."""
    watch = new_web()
    watch.enter(linger_s=0.0)
    for _ in range(3):  # what is made once, is made by now
        _come_and_be_killed(new_web, watch)
    before = watch.do("until_attached", 1)
    for _ in range(kills):
        _come_and_be_killed(new_web, watch)
    end_s = time.monotonic() + ENDS_S  # tasks of the killed end by themselves
    while True:
        after = watch.do("until_attached", 1)
        more = [name for name in COUNTS if getattr(after, name) > getattr(before, name)]
        if not more:
            break
        assert time.monotonic() < end_s, (more, before, after)
    assert after.resident_kib - before.resident_kib < LEAK_KIB


def _come_and_be_killed(new_web: NewWeb, watch: WebWorker) -> None:
    web = new_web()
    web.enter(linger_s=0.0)
    assert web.do("send", 4)[0] == 4 << 18
    web.kill()
    watch.do("until_attached", 1)
