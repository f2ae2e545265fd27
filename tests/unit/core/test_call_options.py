"""`using(...)` knows its options: another name is refused, with the list of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from asyncrpc.core.options import CallOptions
from asyncrpc.core.peers.group import PeerGroup
from asyncrpc.core.peers.peer import CallStarter, Peer
from asyncrpc.errors import UsageError

CALLS = cast("CallStarter", None)  # nothing is called
USINGS = [Peer(CALLS, "b").using, PeerGroup(CALLS, ["b"]).using]


@pytest.mark.parametrize("using", USINGS)
def test_unknown_option_is_refused_with_the_known_ones(
    using: Callable[..., Any],
) -> None:
    with pytest.raises(
        UsageError, match=r"^there is no call option 'timeout'; .* are timeout_s, out, "
    ) as refused:
        using(timeout=2.0)
    for name in CallOptions.__slots__:
        assert name in str(refused.value)


@pytest.mark.parametrize("using", USINGS)
def test_option_values_are_checked(using: Callable[..., Any]) -> None:
    using(timeout_s=2.0).using(codec="bf16")
    with pytest.raises(UsageError, match="timeout_s must be a number of seconds"):
        using(timeout_s="2")


def test_group_calls_have_no_out_option() -> None:
    with pytest.raises(UsageError, match="`out` is for one result"):
        PeerGroup(CALLS, ["b"]).using(out=torch.ones(1))
