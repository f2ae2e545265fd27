"""A hundred seeds of every kind of scenario; `make sim-nightly` runs thousands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import checks
from tests.simulation.__main__ import command
from tests.simulation.participant import Participant
from tests.simulation.scenarios import SMALL, play
from tests.simulation.world import World

SEEDS = range(100)
REPOSITORY = Path(__file__).parents[2]
# Prints the digest of one run, in a process of its own.
SCRIPT = """
import json, sys
from tests.simulation.scenarios import play
print(json.dumps([play(name, 11).digest for name in sys.argv[1:]]))
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_scenarios_keep_their_invariants_for_every_seed(seed: int) -> None:
    scenario = SMALL[seed % len(SMALL)]
    result = play(scenario, seed)
    assert result.problems == [], command(scenario, seed, None)
    assert len(result.world.ledger.calls) > 10


@pytest.mark.slow
def test_seed_gives_the_same_run_in_every_process() -> None:
    """Whatever the process hashes text to: every byte and event is the same."""
    digests = []
    for hashes in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", SCRIPT, *SMALL],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.append(json.loads(output.stdout))
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == len(SMALL)


def test_another_seed_gives_another_run() -> None:
    assert play("calls", 1).digest != play("calls", 2).digest


def test_larger_world_keeps_the_invariants() -> None:
    """What `make sim` runs with a thousand workers."""
    result = play("churn", 3, workers=60)
    assert result.problems == [], command("churn", 3, 60)


def test_check_finds_traces_of_dead_workers_anywhere() -> None:
    """The check of I3 itself: it looks into what a worker can reach."""
    traces: dict[str, str] = {}

    def look(world: World) -> None:
        worker: Participant = world.lives["w0"]
        dead = worker.incarnation ^ 1
        keeper = [{"somewhere": (dead,)}]
        worker.hidden = keeper  # type: ignore[attr-defined]
        traces.update(checks.traces_of(worker, {dead: "the dead"}))  # type: ignore[dict-item]
        del worker.hidden  # type: ignore[attr-defined]

    assert play("calls", 1, look=look).problems == []
    assert traces == {"worker.hidden[][somewhere][]": "the dead"}
