"""What was claimed against what was logged, and what was left behind: the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from asyncrpc import Outcome
from tests.chaos.log import Call
from tests.chaos.losses import Losses

HANG_S: Final = 20.0  # beyond the limit that a call was given
# What a worker may have at the end that it did not have at its start.
MORE_DESCRIPTORS: Final = 8  # for each peer: a connection, lanes, and those before
MORE_TASKS: Final = 4  # for each peer
MORE_THREADS: Final = 40  # those that functions run in
# Of what is in use, from the second quarter of a life to its last: so many times, and
# so much in any case.  Tensors of up to 8 MiB are under way at any time.
GROWTH: Final = 1.25
GROWN: Final = {"bytes": 48 << 20, "blocks": 50_000}
SAMPLES_MIN: Final = 40  # in a shorter life memory says nothing
_MUST_BE_ZERO: Final = ("calls waited for", "calls served", "active", "values")


@dataclass(slots=True)
class Verdict:
    """The sums of a run; all but the first three are to be 0."""

    # Calls by what was claimed and whether they ran.
    outcomes: Counter[tuple[str, bool]] = field(default_factory=Counter)
    # Right calls by the class of their error.
    errors: Counter[str] = field(default_factory=Counter)
    # Why calls were lost; those without a cause, too.
    losses: Losses = field(default_factory=Losses)
    lies: list[str] = field(default_factory=list)  # EXECUTED and did not run
    denials: list[str] = field(default_factory=list)  # NOT_EXECUTED and ran
    doubles: list[str] = field(default_factory=list)  # ran twice
    hangs: list[str] = field(default_factory=list)  # told nothing, or told too late
    leaks: list[str] = field(default_factory=list)  # left behind
    # Wrong results, processes that would not end, and the like.
    others: list[str] = field(default_factory=list)

    @property
    def lines(self) -> dict[str, list[str]]:
        """What has to be empty, by its name."""
        return {
            "claimed EXECUTED, not logged": self.lies,
            "claimed NOT_EXECUTED, but logged": self.denials,
            "run twice": self.doubles,
            f"no answer by the limit + {HANG_S:g} s": self.hangs,
            "lost without a fault of their own": self.losses.lines,
            "left behind": self.leaks,
            "other": self.others,
        }

    @property
    def is_good(self) -> bool:
        return not any(self.lines.values())


def judge_calls(calls: Mapping[str, Call], verdict: Verdict) -> None:
    """Compare every call's claim with what ran."""
    for call_id, call in calls.items():
        words = f"{call_id} ({call.what}; {call.error or 'no error'}) ran on {call.ran}"
        if len(call.ran) > 1:
            verdict.doubles.append(words)
        if call.outcome is None:
            if call.limit_s and not call.is_excused:
                verdict.hangs.append(f"{words}; nothing was told")
            continue
        verdict.outcomes[call.outcome.name, bool(call.ran)] += 1
        if not call.kind:
            verdict.errors[call.error or "none"] += 1
        if call.outcome is Outcome.EXECUTED and not call.ran:
            verdict.lies.append(words)
        if call.outcome is Outcome.NOT_EXECUTED and call.ran:
            verdict.denials.append(words)
        if call.took_s > call.limit_s + HANG_S:
            verdict.hangs.append(f"{words}; {call.took_s} s, of {call.limit_s} allowed")


def judge_holdings(
    first: Mapping[str, Mapping[str, Any]],
    last: Mapping[str, Mapping[str, Any]],
    verdict: Verdict,
) -> None:
    """Compare what workers have at the end with what they had at their start."""
    peers = max(1, len(last) - 1)
    allowed = {
        "descriptors": MORE_DESCRIPTORS * peers,
        "tasks": MORE_TASKS * peers,
        "threads": MORE_THREADS,
    }
    for name, has in last.items():
        for what, count in has.items():
            if what.startswith(_MUST_BE_ZERO) and count:
                verdict.leaks.append(f"{name}: {what}: {count}")
        verdict.leaks += [f"{name}: {record}" for record in has["records"]]
        for what, more in allowed.items():
            had = first[name][what]
            if has[what] > had + more:
                verdict.leaks.append(f"{name}: {has[what]} {what}, at its start {had}")


def judge_memory(
    label: str, samples: Sequence[Mapping[str, int]], verdict: Verdict
) -> None:
    """Compare the memory that a process uses early and late in its life."""
    if len(samples) < SAMPLES_MIN:
        return
    quarter = len(samples) // 4
    for what, more in GROWN.items():
        early = median(sample[what] for sample in samples[quarter : 2 * quarter])
        late = median(sample[what] for sample in samples[-quarter:])
        if late > GROWTH * early and late > early + more:
            verdict.leaks.append(f"{label}: {late:,} {what} in use, before {early:,}")
