"""Wherever workers die and come back, those that live get into one group."""

from __future__ import annotations

import pytest

from asyncrpc.core.membership.machine import arriving, keeping
from tests.property.machines.meeting_world import Rules, begun, explore
from tests.property.machines.spec import Guard, build_of


@pytest.mark.parametrize(
    ("size", "deaths", "lies"),
    [
        (2, 2, 0),
        (2, 1, 1),
        (3, 0, 0),
        pytest.param(2, 2, 1, marks=pytest.mark.slow),
        pytest.param(3, 1, 0, marks=pytest.mark.slow),
    ],
)
def test_living_workers_get_into_one_group(size: int, deaths: int, lies: int) -> None:
    count = explore(Rules(arriving, keeping), begun(size, deaths, lies))
    assert count > 100


def test_missing_offers_leave_rank_0_alone() -> None:
    """The world can tell right from wrong."""
    mute = Guard("mute", "{_E.LOSS: _S.LOOKING},\n", "{},\n")
    with (
        build_of(keeping, mute) as build,
        pytest.raises(AssertionError, match="lives="),
    ):
        explore(Rules(arriving, build), begun(2, 1, 0))


def test_members_that_stop_looking_early_leave_rank_0_alone() -> None:
    early = Guard("early", "_E.WRITTEN: _S.PAUSING", "_E.WRITTEN: _S.RESTING")
    with (
        build_of(keeping, early) as build,
        pytest.raises(AssertionError, match="lives="),
    ):
        explore(Rules(arriving, build), begun(2, 2, 0))


def test_unannounced_worker_may_see_two_groups() -> None:
    hasty = Guard("hasty", "_E.ANSWERED: _S.CLAIMING", "_E.ANSWERED: _S.ASKING")
    with build_of(arriving, hasty) as build, pytest.raises(AssertionError):
        explore(Rules(build, keeping), begun(2, 3, 1))
