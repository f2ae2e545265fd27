"""Replicas as their router sees them, and the weights that they serve."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from asyncrpc.errors import RejectedError, UsageError
from asyncrpc.serving.replicas.machine import states
from asyncrpc.serving.weights.machine import versions
from tests.property.machines.spec import Machine, guards
from tests.property.machines.walk import led, paths_to_all


def _only_two_states_take_calls(build: ModuleType) -> None:
    for state, path in paths_to_all(REPLICA, build).items():
        machine = led(REPLICA, build, path)
        assert machine.takes_calls is (state.name in {"WARMING", "READY"})
        for event in build.ReplicaEvent:
            machine = led(REPLICA, build, path)
            assert machine.advance(event) is (machine.state is not state)


REPLICA: Final = Machine(
    name="A replica",
    about="What one life of a replica takes, as one of its routers sees it.",
    source=states,
    states="ReplicaState",
    starts=("JOINING",),
    begin=lambda build, _: build.ReplicaLife(),
    feed=lambda machine, event: machine.advance(event),
    stories="""
it starts slowly, serves, drains and leaves:
    JOINING -SAID_READY-> WARMING -WARMED-> READY -SAID_DRAINING-> DRAINING -GONE-> LOST
it fails too often, is left out, and comes back slowly:
    READY -FAILED-> EJECTED -RETURNED-> WARMING -FAILED-> EJECTED
it leaves before it was ever ready: JOINING -SAID_DRAINING-> DRAINING -GONE-> LOST
it is lost, wherever it is: JOINING -GONE-> LOST
it is lost while it warms up: WARMING -GONE-> LOST
it is lost while it serves: READY -GONE-> LOST
it is lost while it is left out: EJECTED -GONE-> LOST
it is replaced while it warms up: WARMING -SAID_DRAINING-> DRAINING
it is replaced while it is left out:
    EJECTED -SAID_DRAINING-> DRAINING -RETURNED-> DRAINING
news that are late do not bring it back:
    DRAINING -SAID_READY-> DRAINING -GONE-> LOST -SAID_READY-> LOST
it says again that it is ready, although it fails: EJECTED -SAID_READY-> EJECTED
""",
    checks=(_only_two_states_take_calls,),
    guards=guards(r"""
a-draining-replica-takes-calls:
    frozenset({ReplicaState.WARMING, ReplicaState.READY}) =>
    frozenset(ReplicaState) - {ReplicaState.LOST}
cold-replica-takes-no-calls:
    frozenset({ReplicaState.WARMING, ReplicaState.READY}) =>
    frozenset({ReplicaState.READY})
changes-are-not-reported:
    return event in TRANSITIONS[before] => return event not in TRANSITIONS[before]
"""),
)


# --- weights -------------------------------------------------------------------------

NAMES: Final = ("a", "b", "c")


def _refusal(
    kinds: type[Exception] | tuple[type[Exception], ...],
    act: Callable[..., object],
    *args: object,
) -> str:
    """Return the text of the error that something raises."""
    try:
        act(*args)
    except kinds as error:
        return str(error)
    raise AssertionError("nothing was raised")


def _begun(build: ModuleType, *, serial: int = 1, version: int = 7) -> tuple[Any, Any]:
    machine = build.VersionHistory(3, 1)
    transfer = build.TransferId(10, serial)
    machine.begin(transfer, version, NAMES)
    return machine, transfer


def _serves(machine: Any, number: int, kept: list[int]) -> None:
    assert (machine.served, machine.kept) == (number, kept)


def _parts_count_once_in_any_order(build: ModuleType) -> None:
    for order in itertools.permutations(NAMES):
        for cut in range(1, len(order) + 1):
            machine, transfer = _begun(build)
            parts = [order[:cut], *((name,) for name in order[cut:])]
            for number, part in enumerate(parts):
                _refusal(RejectedError, machine.commit, transfer)
                _serves(machine, 3, [])
                assert machine.take(transfer, part) is (number == len(parts) - 1)
                _refusal((UsageError, RejectedError), machine.take, transfer, part)
            assert machine.commit(transfer) == -1
            _serves(machine, 7, [3])
            _refusal(RejectedError, machine.commit, transfer)


def _unknown_tensors_are_refused(build: ModuleType) -> None:
    machine, transfer = _begun(build)
    text = _refusal(UsageError, machine.take, transfer, ("a", "d"))
    assert "'d' was not expected" in text
    assert machine.missing == set(NAMES)


def _messages_of_another_transfer_do_nothing(build: ModuleType) -> None:
    machine, transfer = _begun(build)
    for other in (build.TransferId(10, 2), build.TransferId(11, 1)):
        _refusal(RejectedError, machine.take, other, ("a",))
        _refusal(RejectedError, machine.commit, other)
        assert not machine.abandon(other)
    assert not machine.on_lost(11)
    assert machine.transfer == transfer
    assert machine.missing == set(NAMES)


def _gone_publisher_leaves_no_transfer(build: ModuleType) -> None:
    for taken in range(4):
        for end in ("abandon", "lost"):
            machine, transfer = _begun(build)
            for name in NAMES[:taken]:
                machine.take(transfer, (name,))
            assert (
                machine.abandon(transfer) if end == "abandon" else machine.on_lost(10)
            )
            assert machine.transfer is None
            assert not machine.missing
            assert machine.state.name == "IDLE"
            _serves(machine, 3, [])
            assert not machine.abandon(transfer)
            assert not machine.on_lost(10)
            machine.begin(build.TransferId(11, 5), 7, NAMES)
            assert machine.transfer == (11, 5)


def _two_publishers_do_not_mix(build: ModuleType) -> None:
    machine, transfer = _begun(build)
    other = build.TransferId(11, 1)
    text = _refusal(RejectedError, machine.begin, other, 8, NAMES)
    assert "another publisher" in text
    assert (machine.transfer, machine.staged) == (transfer, 7)
    machine.take(transfer, ("a",))
    again = build.TransferId(10, 2)
    machine.begin(again, 9, NAMES)  # the same one begins anew
    assert (machine.transfer, machine.staged, machine.missing) == (again, 9, set(NAMES))
    assert machine.take(again, NAMES)
    machine.commit(again)
    _serves(machine, 9, [3])


def _version_numbers_are_not_used_twice(build: ModuleType) -> None:
    machine, transfer = _begun(build)
    machine.take(transfer, NAMES)
    machine.commit(transfer)
    for number in (7, 3):
        later = build.TransferId(10, 2)
        text = _refusal(UsageError, machine.begin, later, number, NAMES)
        assert "is here already" in text
    assert machine.transfer is None


def _kept_versions_are_limited(build: ModuleType) -> None:
    for most in range(3):
        machine = build.VersionHistory(0, most)
        for number in range(1, 5):
            transfer = build.TransferId(1, number)
            machine.begin(transfer, number, NAMES)
            machine.take(transfer, NAMES)
            dropped = number - 1 - most
            assert machine.commit(transfer) == (dropped if dropped >= 0 else -1)
            _serves(machine, number, list(range(max(number - most, 0), number)))


def _rollback_works_once(build: ModuleType) -> None:
    machine, transfer = _begun(build)
    machine.take(transfer, NAMES)
    machine.commit(transfer)
    assert not machine.roll_back(3)
    assert machine.roll_back(7)
    _serves(machine, 3, [])
    assert not machine.roll_back(7)
    text = _refusal(RejectedError, machine.roll_back, 3)
    assert "no earlier one is kept" in text
    _serves(machine, 3, [])


def _rollback_abandons_the_coming_transfer(build: ModuleType) -> None:
    machine, transfer = _begun(build)
    machine.take(transfer, NAMES)
    machine.commit(transfer)
    later = build.TransferId(10, 2)
    machine.begin(later, 8, NAMES)
    machine.take(later, ("a",))
    assert machine.roll_back(7)
    _serves(machine, 3, [])
    assert machine.transfer is None
    _refusal(RejectedError, machine.take, later, ("b",))


WEIGHTS: Final = Machine(
    name="New weights of a replica",
    about="What has come of new weights, beside those that a replica serves.",
    source=versions,
    states="TransferState",
    starts=("IDLE",),
    begin=lambda build, _: build.VersionHistory(3, 1),
    feed=lambda machine, event: machine.advance(event),
    stories="""
new weights come in parts, and are served:
    IDLE -BEGUN-> STAGING -PART-> STAGING -LAST_PART-> STAGED -COMMITTED-> IDLE
they come at once: STAGING -LAST_PART-> STAGED
their publisher dies in the middle: STAGING -ABANDONED-> IDLE
another replica refuses them: STAGED -ABANDONED-> IDLE
the version before is wanted again: IDLE -ROLLED_BACK-> IDLE
it is wanted while others come: STAGING -ROLLED_BACK-> IDLE
it is wanted when they are there: STAGED -ROLLED_BACK-> IDLE
nothing is served that is not whole: STAGING -COMMITTED-> STAGING
""",
    checks=(
        _parts_count_once_in_any_order,
        _unknown_tensors_are_refused,
        _messages_of_another_transfer_do_nothing,
        _gone_publisher_leaves_no_transfer,
        _two_publishers_do_not_mix,
        _version_numbers_are_not_used_twice,
        _kept_versions_are_limited,
        _rollback_works_once,
        _rollback_abandons_the_coming_transfer,
    ),
    guards=guards("""
partial-version-is-served:
    self._check(transfer, TransferState.STAGED) => self._check(transfer, self.state)
a-part-of-another-transfer-counts:
    if self.transfer != transfer or self.state is not state: =>
    if self.state is not state:
a-part-counts-twice: if unwanted: => if False:
the-first-part-is-the-last: is_last = not self.missing => is_last = True
another-publisher-takes-over:
    if self.transfer.publisher != transfer.publisher: => if False:
a-number-is-used-twice:
    if version == self.served or version in self.kept: => if version == self.served:
the-served-number-is-used-twice:
    if version == self.served or version in self.kept: => if version in self.kept:
all-versions-are-kept:
    len(self.kept) > self._kept_max => len(self.kept) > self._kept_max + 1
rollback-works-twice: if self.served != from_version: => if False:
loss-of-any-publisher-ends-a-transfer:
    if self.transfer is None or self.transfer.publisher != publisher: =>
    if self.transfer is None:
abandoned-tensors-are-still-awaited: self.missing.clear() =>
rollback-keeps-the-coming-transfer: self.advance(TransferEvent.ROLLED_BACK) =>
"""),
)
