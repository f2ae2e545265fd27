"""Which replica gets a call: by load, by key, by canary share, by health.

- *By load*: of two replicas chosen at random, the one with the smaller load.  That is
  the load that it reported with its last answer, minus the calls that this router had
  there then, plus those that it has there now.  The reported part is halved each
  second: a silent replica comes to count as idle, so that it is tried again.
- *By key*: the highest score of a rendezvous hash; all routers agree.
- *Canaries*: a replica may be a canary, and report which share of the calls canaries
  get.  For a call with a key, the key decides, so that all routers decide alike.
- *Health*: replicas that fail several times in a row are left out for a while, unless
  too many would be.  If no other is left, they are used: a wrong verdict must not stop
  the service.

All choices are made with numbers that `draw` returns: random ones from 0 to below 1.

Retries and hedged calls add at most a share to all calls (`ShareBudget`): each call
pays a share into the budget; each retry takes 1 out of it.  So when all replicas are
overloaded, retries add no more than that share to the load; without a budget, every
call would be made as often as it may be tried.  `per_s` allows retries also to a
program that calls rarely.

For the same key all routers choose alike without communication.  Each replica has a
score for a key, by a hash of both; the highest wins.  So a router
stores nothing per key; two routers that know the same replicas agree; and when a
replica goes, only its own keys move, evenly to all others.

Scores are by the name: a replica that is started again gets its keys back.

Source: D. Thaler, C. Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Transactions on Networking 6(1), 1998.  Weights: J. Resch, "New Hashing
Algorithms for Data Storage", SNIA 2015.

Source: Finagle's `RetryBudget` (a share of the requests, and a few a second),
https://twitter.github.io/finagle/guide/Clients.html#retries; gRPC's
`retryThrottling`, https://github.com/grpc/proposal/blob/master/A6-client-retries.md

Source: M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE
TPDS 12(10), 2001.  B. Wydrowski et al., "Load is not what you should balance:
Introducing Prequal", NSDI 2024, for requests in flight as the load, as seen by the
replica itself.  J. Dean, L. Barroso, "The Tail at Scale", CACM 56(2), 2013, for hedged
requests.  V. Mirrokni et al., "Consistent Hashing with Bounded Loads", SODA 2018, for
`key_load_max`.

The latencies of the last calls are kept in a histogram with buckets that grow by 9 %,
in two halves: when the younger half is full, the older is forgotten.  So a quantile is
of the last 500 to 1,000 calls, and accurate to 9 %, whatever the latencies are.

A call that was given up, because another answered in its place, counts with the time
that it ran: it would have taken at least that long.  Otherwise the slow calls would be
missing, and each quantile would be too low.

Source: buckets that grow by a factor are those of C. Masson, J. Rim, H. Lee,
"DDSketch", VLDB 2019.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable
from typing import Final

from asyncrpc.serving.replicas.machine.attempts import Health
from asyncrpc.serving.replicas.machine.states import (
    ReplicaEvent,
    ReplicaLife,
    ReplicaState,
)
from asyncrpc.serving.replicas.options import ReplicaOptions

FIRST_S: Final = 1e-5  # shorter latencies count as this
PER_DOUBLING: Final = 8  # buckets; each is 9 % wide
BUCKETS: Final = 27 * PER_DOUBLING  # up to 1,300 s; longer latencies count as that
HALF_MAX: Final = 512  # calls
CALLS_MIN: Final = 32  # calls; a high quantile of fewer says nothing
REFRESH_EVERY: Final = 16  # calls after which the quantile is found anew


class LatencyWindow:
    """The latencies of the last calls of one function."""

    __slots__ = ("_cached", "_older", "_quantile", "_recorded", "_stale", "_younger")

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._younger, self._older = [0] * BUCKETS, [0] * BUCKETS
        self._recorded = 0  # in the younger half
        self._stale = 0  # calls until the quantile is found anew
        self._cached = math.inf

    @property
    def count(self) -> int:
        """Return how many calls are in the window."""
        return sum(self._younger) + sum(self._older)

    def record(self, latency_s: float) -> None:
        """Add the latency of one call, in seconds."""
        if self._recorded == HALF_MAX:
            self._older, self._younger = self._younger, [0] * BUCKETS
            self._recorded = 0
        self._younger[bucket_of(latency_s)] += 1
        self._recorded += 1
        self._stale -= 1

    @property
    def quantile_s(self) -> float:
        """Return the quantile, in seconds; infinite with too few calls."""
        if self._stale <= 0:
            self._stale = REFRESH_EVERY
            self._cached = self._find()
        return self._cached

    def _find(self) -> float:
        total = self.count
        if total < CALLS_MIN:
            return math.inf
        wanted, seen = self._quantile * total, 0
        for bucket, young in enumerate(self._younger):
            seen += young + self._older[bucket]
            if seen >= wanted:
                return end_of(bucket)
        return end_of(BUCKETS - 1)  # of a quantile of 1 and rounding


def bucket_of(latency_s: float) -> int:
    """Return the bucket of a latency, in seconds."""
    if latency_s <= FIRST_S:
        return 0
    bucket = math.ceil(math.log2(latency_s / FIRST_S) * PER_DOUBLING)
    return min(bucket, BUCKETS - 1)


def end_of(bucket: int) -> float:
    """Return the longest latency of a bucket, in seconds."""
    return FIRST_S * math.exp2(bucket / PER_DOUBLING)


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


class ShareBudget:
    """A share of all calls, saved up to a limit.

    Attributes:
        remaining: how many could be taken at once.
    """

    __slots__ = (
        "_at_s",
        "_most",
        "_per_s",
        "_share",
        "granted",
        "refused",
        "remaining",
    )

    def __init__(
        self, share: float, *, most: float, per_s: float = 0.0, first: float = 0.0
    ) -> None:
        self._share = share
        self._most = most
        self._per_s = per_s
        self._at_s: float | None = None
        self.remaining = first
        self.granted = self.refused = 0

    def pay(self, now_s: float) -> None:
        """Pay in the share of one call."""
        since_s = 0.0 if self._at_s is None else max(now_s - self._at_s, 0.0)
        self._at_s = now_s
        paid = self.remaining + self._share + since_s * self._per_s
        self.remaining = min(paid, self._most)

    def take(self) -> bool:
        """Take 1 out; return whether the balance allowed it."""
        if self.remaining < 1.0:
            self.refused += 1
            return False
        self.remaining -= 1.0
        self.granted += 1
        return True


Draw = Callable[[], float]

LOAD_HALF_LIFE_S: Final = 1.0
LOAD_MIN: Final = 0.5  # of other routers; less counts as none
FIRST_SHARE: Final = 0.1  # of its calls, for a replica that has just become ready
EJECTION_FACTOR_MAX: Final = 10
RETRIES_SAVED: Final = 100.0  # the death of a replica with so many calls is survived
RETRIES_PER_S: Final = 1.0
HEDGES_SAVED: Final = (
    30.0  # a pause of one replica, of the size of a garbage collection
)
FUNCTIONS_MAX: Final = 256  # whose latencies are kept; calls of others are not hedged


class ReplicaRecord:
    """What a router knows of one incarnation of a replica.

    Attributes:
        weight: its share, relative to those of others.
        canary: share of the calls that canaries get; 0: it is not a canary.
        version: of its weights, as last reported; None: it has none.
        calls: how many it has ever been given.
        failures: how many of the last calls failed in a row.
    """

    __slots__ = (
        *("calls", "canary", "ejections", "failures", "incarnation", "life", "name"),
        *("others", "outstanding", "since_s", "told_s", "until_s", "version", "weight"),
    )

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.life = ReplicaLife()
        self.weight = 1.0
        self.canary = 0.0
        self.version: int | None = None
        self.outstanding = 0
        self.calls = 0
        self.others = 0.0  # the reported load that is not from this router
        self.told_s = 0.0
        self.since_s = 0.0  # when it became ready, or came back
        self.until_s = 0.0  # when it comes back
        self.failures = 0
        self.ejections = 0

    def load(self, now_s: float) -> float:
        """Return how many calls the replica works on, as far as is known."""
        age_s = max(now_s - self.told_s, 0.0)
        others = self.others * 0.5 ** (age_s / LOAD_HALF_LIFE_S)
        # A remainder that never reaches 0 would keep the replica from ever being tried.
        return self.outstanding + (others if others > LOAD_MIN else 0.0)

    def tell_load(self, load: float, now_s: float) -> None:
        """Take the load that the replica has just reported."""
        self.others = max(load - self.outstanding, 0.0)
        self.told_s = now_s


class Routing:
    """The replicas of one router, and what it may add to their load."""

    def __init__(self, options: ReplicaOptions) -> None:
        self.options = options
        self.retries = ShareBudget(
            options.retry_share,
            most=RETRIES_SAVED,
            per_s=RETRIES_PER_S,
            first=10.0 if options.retry_share else 0.0,
        )
        self.hedges = ShareBudget(options.hedge_share, most=HEDGES_SAVED)
        self._records: dict[str, ReplicaRecord] = {}
        self._latencies: dict[str, LatencyWindow] = {}
        self._taking: list[ReplicaRecord] | None = None  # None: to be found anew
        self._timed = 0  # how many are WARMING or EJECTED

    # --- which replicas there are ----------------------------------------------------

    @property
    def records(self) -> Iterable[ReplicaRecord]:
        """Return all known replicas, by name."""
        return [self._records[name] for name in sorted(self._records)]

    def get(self, name: str) -> ReplicaRecord | None:
        """Return the record of a replica; None if it is not known."""
        return self._records.get(name)

    def add(self, name: str, incarnation: int) -> ReplicaRecord:
        """Add a replica; an earlier incarnation of it is over."""
        self.remove(name)
        record = self._records[name] = ReplicaRecord(name, incarnation)
        self._on_changed()
        return record

    def remove(self, name: str) -> None:
        """Remove a replica that is gone."""
        record = self._records.pop(name, None)
        if record is not None:
            self.advance(record, ReplicaEvent.GONE)

    def advance(self, record: ReplicaRecord, event: ReplicaEvent) -> bool:
        """Apply an event to a replica; return whether its state has changed."""
        has_changed = record.life.advance(event)
        if has_changed:
            self._on_changed()
        return has_changed

    def make_ready(self, record: ReplicaRecord, now_s: float, *, age_s: float) -> None:
        """Note that a replica has been ready for `age_s` seconds."""
        if self.advance(record, ReplicaEvent.SAID_READY):
            record.since_s = now_s - age_s
            self.tick(now_s)

    def set_canary(self, record: ReplicaRecord, share: float) -> None:
        """Note the canary share that a replica reports; 0: it is not a canary."""
        if record.canary != share:
            record.canary = share
            self._on_changed()

    def _on_changed(self) -> None:
        self._taking = None
        timed = (ReplicaState.WARMING, ReplicaState.EJECTED)
        self._timed = sum(
            record.life.state in timed for record in self._records.values()
        )

    def tick(self, now_s: float) -> None:
        """Apply the changes that are due by time."""
        if not self._timed:
            return
        for record in self._records.values():
            if record.life.state is _EJECTED and now_s >= record.until_s:
                record.since_s = now_s
                record.failures = 0
                self.advance(record, ReplicaEvent.RETURNED)
            is_warm = now_s - record.since_s >= self.options.warm_s
            if record.life.state is ReplicaState.WARMING and is_warm:
                self.advance(record, ReplicaEvent.WARMED)

    # --- which replica gets a call ---------------------------------------------------

    def choose(
        self,
        now_s: float,
        draw: Draw,
        *,
        key: bytes | None = None,
        tried: Collection[ReplicaRecord] = (),
    ) -> ReplicaRecord | None:
        """Return the replica that a call goes to; None: no other is left."""
        self.tick(now_s)
        pool = self._pool(tried)
        if not pool:
            return None
        pool = self._with_canaries(pool, key, draw)
        if key is not None:
            return self._by_key(pool, key, now_s)
        if self._timed:
            pool = self._warm_enough(pool, now_s, draw)
        return self._by_load(pool, now_s, draw)

    def _pool(self, tried: Collection[ReplicaRecord]) -> list[ReplicaRecord]:
        taking = self._taking
        if taking is None:
            there = self.records
            taking = [record for record in there if record.life.takes_calls]
            if not taking:  # a replica that failed is better than none
                taking = [record for record in there if record.life.state is _EJECTED]
            self._taking = taking
        if not tried:
            return taking
        return [record for record in taking if record not in tried]

    @staticmethod
    def _with_canaries(
        pool: list[ReplicaRecord], key: bytes | None, draw: Draw
    ) -> list[ReplicaRecord]:
        """Return the canaries or the others, chosen by the canary share."""
        share = max(record.canary for record in pool)
        if not share:
            return pool
        chance = draw() if key is None else unit_of(key, _CANARY_SALT)
        wants_canary = chance < share
        chosen = [record for record in pool if (record.canary > 0) is wants_canary]
        return chosen or pool

    def _by_key(
        self, pool: list[ReplicaRecord], key: bytes, now_s: float
    ) -> ReplicaRecord:
        limit = self.options.key_load_max
        if limit is None:
            return max(
                pool, key=lambda record: score_of(key, record.name, record.weight)
            )
        in_order = sorted(
            pool,
            key=lambda record: score_of(key, record.name, record.weight),
            reverse=True,
        )
        # The call itself counts: with an idle pool the first one has room.
        most = limit * (sum(record.load(now_s) for record in pool) + 1) / len(pool)
        for record in in_order:
            if record.load(now_s) + 1 <= max(most, 1.0):
                return record
        return in_order[0]

    def _warm_enough(
        self, pool: list[ReplicaRecord], now_s: float, draw: Draw
    ) -> list[ReplicaRecord]:
        """Return the replicas, each warming one only with the chance of its share."""
        eligible = [
            record
            for record in pool
            if record.life.state is not ReplicaState.WARMING
            or draw() < self._warm_share(record, now_s)
        ]
        return eligible or pool

    def _warm_share(self, record: ReplicaRecord, now_s: float) -> float:
        return max((now_s - record.since_s) / self.options.warm_s, FIRST_SHARE)

    @staticmethod
    def _by_load(pool: list[ReplicaRecord], now_s: float, draw: Draw) -> ReplicaRecord:
        count = len(pool)
        if count == 1:
            return pool[0]
        first = int(draw() * count)
        second = int(draw() * (count - 1))
        record, other = pool[first], pool[second + (second >= first)]
        record_cost = (record.load(now_s) + 1) / record.weight
        other_cost = (other.load(now_s) + 1) / other.weight
        return record if record_cost <= other_cost else other

    # --- calls under way -------------------------------------------------------------

    def begin(self, record: ReplicaRecord) -> None:
        """Note that a call goes to a replica."""
        record.outstanding += 1
        record.calls += 1

    def end(self, record: ReplicaRecord, health: Health, now_s: float) -> bool:
        """Note the end of a call; return whether the replica is ejected for it."""
        record.outstanding -= 1
        if health is Health.GOOD:
            record.failures = 0
        elif health is Health.BAD:
            record.failures += 1
            return self._eject_if_bad(record, now_s)
        return False

    def _eject_if_bad(self, record: ReplicaRecord, now_s: float) -> bool:
        options = self.options
        if not options.eject_after or record.failures < options.eject_after:
            return False
        count = len(self._records)
        ejected = sum(other.life.state is _EJECTED for other in self._records.values())
        if count < _OTHERS_MIN or ejected + 1 > max(options.eject_share * count, 1.0):
            return False
        if not self.advance(record, ReplicaEvent.FAILED):
            return False
        # Each period of `eject_s` without an ejection makes up for an earlier one.
        well = int((now_s - record.until_s) / options.eject_s) if options.eject_s else 0
        record.ejections = max(record.ejections - well, 0) + 1
        factor = min(record.ejections, EJECTION_FACTOR_MAX)
        record.until_s = now_s + options.eject_s * factor
        return True

    # --- hedging ---------------------------------------------------------------------

    def hedge_after_s(self, function: str) -> float | None:
        """Return the seconds after which a call is made once more; None: never."""
        window = self._latencies.get(function)
        if window is None:
            return None
        quantile_s = window.quantile_s
        return quantile_s if quantile_s < _FOR_EVER else None

    def record_latency(self, function: str, latency_s: float) -> None:
        """Record how long a call took, or ran before it was given up."""
        quantile = self.options.hedge_quantile
        if quantile is None:
            return
        window = self._latencies.get(function)
        if window is None:
            if len(self._latencies) >= FUNCTIONS_MAX:
                return
            window = self._latencies[function] = LatencyWindow(quantile)
        window.record(latency_s)


_EJECTED: Final = ReplicaState.EJECTED
_OTHERS_MIN: Final = 2  # replicas of which one may be left out
_FOR_EVER: Final = float("inf")
_CANARY_SALT: Final = "\x00canary"  # not a worker's name, so unrelated to its scores
