"""The built-in hooks give what torch's give, in the same processes, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrpc.multiprocessing import launch
from tests.numerics.ddp.hooks_beside_torch import DEFAULT, LARGE, Case, play

# Over two ranks there is one order of additions.  Over more, gloo has another than we:
# then each of the few additions may be off by half a unit of the dtype that is added.
UNITS = 4.0
ADDED_IN = {"fp16": torch.float16, "bf16": torch.bfloat16}


def tolerance(hook: str, dtype: torch.dtype, size: int) -> float:
    if size == 2:
        return 0.0
    added_in = ADDED_IN.get(hook[:4], dtype)
    return UNITS * max(torch.finfo(kind).eps for kind in (added_in, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_plain_hooks_match_torch(size: int, tmp_path: Path) -> None:
    cases = [
        Case(hook, dtype=dtype, steps=2, tolerance=tolerance(hook, dtype, size))
        for hook in DEFAULT
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    ]
    cases += [
        Case(hook, buckets=LARGE, steps=1, tolerance=tolerance(hook, torch.float32, 3))
        for hook in DEFAULT
    ]
    launch(play, (str(tmp_path), "default", cases), size, method="forkserver")


@pytest.mark.slow
def test_post_local_sgd_matches_torch(tmp_path: Path) -> None:
    cases = [
        Case(
            "local",
            {"start_localSGD_iter": 2, "post_local_gradient_allreduce": goes_on},
            steps=4,
        )
        for goes_on in (True, False)
    ]
    launch(play, (str(tmp_path), "local", cases), 4, method="forkserver")
