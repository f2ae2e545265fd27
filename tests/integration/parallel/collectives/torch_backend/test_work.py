"""Work: waiting, asking, futures; what is wrong is said, and hangs nobody."""

from __future__ import annotations

import pytest

from asyncrpc.multiprocessing import launch
from tests.integration.parallel.collectives.torch_backend import working
from tests.integration.parallel.collectives.torch_backend.playing import Scenario, play

SCENARIOS = [
    working.check_asking,
    working.check_waiting_in_threads,
    working.check_chaining,
    working.check_many,
    working.check_wrong_arguments,
    working.check_mismatch,
    working.check_own_thread,
    working.check_timeouts,
    working.check_after_the_end,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_work_object_behaves_as_torchs(scenario: Scenario) -> None:
    launch(play, args=(scenario,), nprocs=3, method="forkserver", timeout_s=60.0)
