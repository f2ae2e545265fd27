"""Which replica a key belongs to: all routers agree without communication.

Each replica has a score for a key, by a hash of both; the highest wins.  So a router
stores nothing per key; two routers that know the same replicas agree; and when a
replica goes, only its own keys move, evenly to all others.

Scores are by the name: a replica that is started again gets its keys back.

Source: D. Thaler, C. Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Transactions on Networking 6(1), 1998.  Weights: J. Resch, "New Hashing
Algorithms for Data Storage", SNIA 2015.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

_SCALE: Final = 1.0 / (1 << 64)


def score_of(key: bytes, name: str, weight: float = 1.0) -> float:
    """Return the score of a replica for a key: at least 0."""
    return -weight / math.log(unit_of(key, name))


def unit_of(key: bytes, salt: str = "") -> float:
    """Return the number of a key, above 0 and below 1; keys are spread evenly."""
    # The length in front: (b"ab", "c") is not (b"a", "bc").
    text = len(key).to_bytes(8, "big") + key + salt.encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return (digest + 0.5) * _SCALE if digest < (1 << 64) - 1024 else 1.0 - 2.0**-53
