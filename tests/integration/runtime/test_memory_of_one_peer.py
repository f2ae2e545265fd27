"""What one peer sends takes a bounded amount of memory, and others go on."""

from __future__ import annotations

import pytest

from tests.integration.runtime.memory_attacks import (
    ATTACKS,
    MIB,
    honest_call,
    raw_peer,
    victim,
)

PEER_BYTES_MAX = 256 * MIB
# Answers of 2 KB that nobody reads take more than they count: see limits.md.
MORE_BYTES = {"small answers, unread": 448 * MIB}


@pytest.mark.parametrize("name", ATTACKS)
async def test_what_one_peer_takes(name: str) -> None:
    with victim() as target:
        await honest_call(target)
        target.forget_peak()
        before_bytes = target.resident_bytes
        async with raw_peer(target) as peer:
            await ATTACKS[name](peer)
            await honest_call(target)
            taken_bytes = target.peak_bytes - before_bytes
        most_bytes = MORE_BYTES.get(name, PEER_BYTES_MAX)
        assert taken_bytes < most_bytes + peer.granted_bytes
        await honest_call(target)
