"""torch's own trainers run over asyncrpc: DDP and its hooks, FSDP2, checkpoints."""

from __future__ import annotations

import pytest

from asyncrpc.multiprocessing import launch
from tests.integration.parallel.collectives.torch_backend import training
from tests.integration.parallel.collectives.torch_backend.playing import Scenario, play
from tests.integration.parallel.collectives.torch_backend.training import Register

HOOKS = [
    training.plain,
    training.allreduce,
    training.fp16,
    training.bf16,
    training.power_sgd,
]


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS, ids=lambda scenario: scenario.__name__)
def test_ddp_trains_as_over_gloo(hook: Register) -> None:
    launch(
        play,
        args=(training.check_hook, hook),
        nprocs=2,
        method="forkserver",
        timeout_s=120.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        training.check_unused_and_uneven,
        training.check_sparse_gradients,
        training.check_fully_sharded,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_trainer_of_torch_trains(scenario: Scenario) -> None:
    launch(play, args=(scenario,), nprocs=2, method="forkserver", timeout_s=120.0)
