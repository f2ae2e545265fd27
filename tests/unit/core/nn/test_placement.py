"""What `"worker/device"` may be, and that anything else is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc import UsageError
from asyncrpc.core.nn.remote_module import Placement


@pytest.mark.parametrize(
    ("text", "worker", "device", "rank"),
    [
        ("ps", "ps", "cpu", None),
        ("ps/cpu", "ps", "cpu", None),
        ("trainer-0.host/cuda:1", "trainer-0.host", "cuda:1", None),
        ("ps/cuda", "ps", "cuda", None),
        ("0/cpu", "0", "cpu", 0),
        ("12", "12", "cpu", 12),
        ("rank:3/xla:0", "rank:3", "xla:0", 3),
        ("rank:x/cpu", "rank:x", "cpu", None),
        ("größe/cpu", "größe", "cpu", None),
    ],
)
def test_every_form_of_placement_is_read(
    text: str, worker: str, device: str, rank: int | None
) -> None:
    placement = Placement.parse(text)
    assert (placement.worker, placement.device, placement.rank) == (
        worker,
        device,
        rank,
    )
    assert Placement.parse(str(placement)) == placement


@pytest.mark.parametrize(
    "text",
    [
        *("", "/", "/cpu", "ps/", "ps/cpu/0", "ps/cuda:", "ps/:0", "ps/cuda:-1"),
        *("ps/CUDA", "ps /cpu", "ps/cpu ", "ps/cuda:x", "\n", "ps/cpu\n", None, 3),
    ],
)
def test_malformed_placement_is_refused_and_shown(text: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Placement.parse(text)
    assert repr(text) in str(caught.value)
    assert "'ps/cpu'" in str(caught.value)  # what to write instead
