"""What new processes run when they are started rightly."""

from __future__ import annotations


def rank_of(rank: int, *_: object) -> int:
    return rank
