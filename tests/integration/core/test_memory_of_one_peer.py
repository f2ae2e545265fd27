"""What one peer sends takes a bounded amount of memory, and others go on."""

from __future__ import annotations

import pytest

from tests.integration.core.attacked_worker import MIB, honest_call, raw_peer, victim
from tests.integration.core.memory_attacks import ATTACKS

PEER_BYTES_MAX = 256 * MIB


@pytest.mark.parametrize("name", ATTACKS)
async def test_memory_taken_by_a_peer_is_bounded(name: str) -> None:
    with victim() as target:
        await honest_call(target)
        target.forget_peak()
        before_bytes = target.resident_bytes
        async with raw_peer(target) as peer:
            await ATTACKS[name](peer)
            await honest_call(target)
            taken_bytes = target.peak_bytes - before_bytes
        # Bytes are copied out of their payload: for a moment there are both.
        taken_for_data = min(peer.granted_bytes, 2 * peer.sent_bytes)
        assert taken_bytes < PEER_BYTES_MAX + taken_for_data
        await honest_call(target)
