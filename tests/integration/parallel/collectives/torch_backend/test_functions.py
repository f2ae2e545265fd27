"""Every function of torch.distributed gives over asyncrpc what it gives over gloo."""

from __future__ import annotations

import pytest

from asyncrpc.multiprocessing import launch
from tests.integration.parallel.collectives.torch_backend import functions
from tests.integration.parallel.collectives.torch_backend.playing import Scenario, play

SCENARIOS = [
    functions.check_all_reduce,
    functions.check_average,
    functions.check_layouts,
    functions.check_resizing,
    functions.check_sparse,
    functions.check_roots,
    functions.check_gathers,
    functions.check_reduce_scatters,
    functions.check_all_to_all,
    functions.check_objects,
    functions.check_points,
    functions.check_coalesced,
    functions.check_former_names,
    functions.check_short_forms,
    functions.check_functional,
    functions.check_subgroups,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_function_gives_the_result_of_gloo(scenario: Scenario) -> None:
    launch(play, args=(scenario,), nprocs=3, method="forkserver", timeout_s=60.0)
