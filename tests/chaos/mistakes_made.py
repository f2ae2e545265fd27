"""How many mistakes were really made, of each kind, and by how many workers at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.log import Call, End, Story


@dataclass(slots=True)
class Mistakes:
    counts: Counter[str] = field(default_factory=Counter)  # how many, by kind
    # How many of a kind ended in a way; those given up are in none.
    ends: Counter[tuple[str, End]] = field(default_factory=Counter)
    workers: set[str] = field(default_factory=set)  # names of those who made them
    at_once: int = 0  # workers that had one under way at the same time, at most


def count_mistakes(story: Story) -> Mistakes:
    mistakes = Mistakes()
    wrong = [call for call in story.calls.values() if call.kind]
    for call in wrong:
        mistakes.counts[call.kind] += 1
        mistakes.workers.add(call.caller.partition(".")[0])
        if call.outcome is not None:
            mistakes.ends[call.kind, call.end] += 1
    mistakes.at_once = _most_at_once(
        [call for call in wrong if call.outcome is not None]
    )
    return mistakes


def _most_at_once(calls: list[Call]) -> int:
    moments = [(call.begun_s, 1, call.caller) for call in calls]
    moments += [(call.ended_s, -1, call.caller) for call in calls]
    under_way: Counter[str] = Counter()
    most = 0
    for _, more, caller in sorted(moments):
        under_way[caller] += more
        most = max(most, sum(count > 0 for count in under_way.values()))
    return most
