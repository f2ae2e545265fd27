"""What one peer that means harm costs a worker: memory, and the loop.

    python -m tests.bench.bench_hostile [names of attacks]

Each attack of `tests.integration.core.memory_attacks` has a worker of its own, in a
process of its own.  `memory` is the most that it has more than before; of it, `credit`
was granted to the peer for large requests.  `lag` is by how much its loop was late at
worst, passes of Python's garbage collector included.
"""

from __future__ import annotations

import asyncio
import sys

from tests.integration.core.attacked_worker import MIB, honest_call, raw_peer, victim
from tests.integration.core.memory_attacks import ATTACKS


async def cost(name: str) -> tuple[int, int, float]:
    """Return the memory that an attack takes, the credit, and the worst lag."""
    with victim() as target:
        await honest_call(target)
        await honest_call(target)
        target.forget_peak()
        before_bytes = target.resident_bytes
        async with raw_peer(target) as peer:
            await ATTACKS[name](peer)
            lag_s: float = await honest_call(target)
            return target.peak_bytes - before_bytes, peer.granted_bytes, lag_s


def main() -> None:
    """Print a row for each attack."""
    print(f"{'attack':34} {'memory':>9} {'credit':>9} {'lag':>9}")
    for name in sys.argv[1:] or ATTACKS:
        nbytes, granted, lag_s = asyncio.run(cost(name))
        sizes = f"{nbytes // MIB:5} MiB {granted // MIB:5} MiB"
        print(f"{name:34} {sizes} {lag_s * 1e3:6.0f} ms", flush=True)


if __name__ == "__main__":
    main()
