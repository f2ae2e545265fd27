"""ZeRO steps as torch's, and as an optimizer of one rank, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrpc.multiprocessing import launch
from tests.numerics.ddp.zero_beside_torch import Case, play

SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
CASES = [
    Case(*SGD),
    Case(torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    Case(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    Case(*SGD, as_views=True),
    Case(torch.optim.Adam, {"lr": 0.01, "foreach": True}, torch.float64, as_views=True),
    Case(torch.optim.AdamW, {"lr": 0.01}, as_views=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_zero_steps_match_torch_and_one_rank_bitwise(size: int, tmp_path: Path) -> None:
    launch(play, (str(tmp_path), CASES), size, method="forkserver", timeout_s=200)
