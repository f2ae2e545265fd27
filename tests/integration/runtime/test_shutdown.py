"""A graceful end waits for every call, however long the chain that it is at the end of.

And an end alone takes the time that it is given and a second, whatever does not end.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import pytest

from asyncrpc.multiprocessing import launch
from tests.integration.runtime import ends
from tests.integration.runtime.ends import Chain

DEPTH = 20


# --- chains of calls over processes --------------------------------------------------


@pytest.mark.parametrize("at_once", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize(
    "chain",
    [
        ends.in_coroutines,
        ends.in_threads,
        ends.with_references,
        ends.through_streams,
        ends.by_turns,
    ],
)
def test_a_graceful_end_waits_for_a_chain_that_nobody_awaits(
    chain: Chain,
    tmp_path: Path,
    *,
    at_once: bool,
) -> None:
    """Twenty calls deep, over four processes, whether or not they were connected."""
    arguments = (chain, str(tmp_path), DEPTH, at_once)
    ended_s = launch(
        ends.end_together, arguments, ends.WORLD_SIZE, method="forkserver"
    )
    ran_s = {path.name: float(path.read_text()) for path in tmp_path.iterdir()}
    assert len(ran_s) == DEPTH
    assert min(ended_s) > max(ran_s.values())
