"""Torch's names, used wrongly: each mistake ends, and the traffic beside it goes on."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

import pytest
import torch

from asyncrpc.compat import rpc
from tests.integration.compat.playing import play
from tests.integration.misuse.uses_compat import PEER, USES, Use

HANGS_AFTER_S: Final = 60.0  # only what never ends reaches it


class Traffic:
    """Calls that a thread makes to the peer, one after the other."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._rounds = 0
        self._stops = False
        self._thread = threading.Thread(target=self._flow)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stops = True
        self._thread.join()

    def _flow(self) -> None:
        while not self._stops:
            assert rpc.rpc_sync(PEER, torch.add, (torch.ones(2), 1)).sum() == 4.0
            assert rpc.remote(PEER, torch.ones, (3,)).to_here().sum() == 3.0
            with self._news:
                self._rounds += 1
                self._news.notify_all()

    def another_round(self) -> None:
        """Wait until a round has begun and ended from now on."""
        with self._news:
            before = self._rounds
            assert self._news.wait_for(
                lambda: self._rounds >= before + 2, HANGS_AFTER_S
            ), "the traffic has ended"


def outcome_of(use: Use, *mistake: str) -> str:
    """Make one attempt in a thread, and return what came of it."""
    thread = ThreadPoolExecutor(1)
    error = thread.submit(use.attempt, *mistake).exception(HANGS_AFTER_S)
    thread.shutdown()
    if error is None:
        return ""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", f"{type(error).__name__}: {error}")


def make_mistakes(name: str) -> None:
    use = USES[name]
    assert not outcome_of(use), "used rightly, it failed"
    with Traffic() as traffic:
        traffic.another_round()
        for mistake in use.mistakes():
            first = outcome_of(use, *mistake)
            assert first, f"{mistake} was accepted"
            assert outcome_of(use, *mistake) == first, mistake
        traffic.another_round()
    assert not outcome_of(use), "used rightly again, it failed"


@pytest.mark.parametrize("name", USES)
def test_mistake_fails_its_call_only(name: str) -> None:
    play(make_mistakes, name)
