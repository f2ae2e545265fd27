"""What a change costs one worker hardly grows with the group: counted, not timed."""

from __future__ import annotations

import math
from functools import cache

import pytest

from asyncrpc import LimitOptions, Options
from asyncrpc.core.membership.service import WAKE_S
from asyncrpc.testing import Cluster
from asyncrpc.testing.network import Network
from tests.simulated import play
from tests.simulation.scaling import FIGURES, Costs, exponent, markdown, measure

SMALL, LARGE = 40, 160


@cache
def measured(size: int) -> Costs:
    return measure(size, seed=1)


def of(figure: str) -> tuple[float, float]:
    return measured(SMALL).figures[figure], measured(LARGE).figures[figure]


@pytest.mark.parametrize(
    "figure",
    [
        "rest_messages_per_s",
        "rest_bytes_per_s",
        "rest_links",
        "join_news",
        "storm_news",
        "death_news",
        "links_mean",
        "barrier_messages",
        "end_messages",
    ],
)
def test_worker_pays_logarithmically_at_most(figure: str) -> None:
    small, large = of(figure)
    assert 0 < large <= small * math.log(LARGE) / math.log(SMALL)


def test_joining_worker_is_told_of_all_once() -> None:
    """The list of members is what it costs: that many records."""
    small, large = of("join_bytes")
    assert large / small < LARGE / SMALL


def test_newcomers_do_not_delay_the_news_of_each_other() -> None:
    """32 join at once: many news pass through one that came a moment before."""
    assert max(of("storm_known_s_max")) < WAKE_S


def test_uncalled_worker_takes_a_record_only() -> None:
    async def scenario(network: Network) -> None:
        options = Options(
            limits=LimitOptions(shared_memory_bytes=0, receive_pool_bytes=0)
        )
        names = [f"w{number}" for number in range(50)]
        async with Cluster(names=names, network=network, options=options) as workers:
            await workers[0].peer("w7").call(abs, -1)
            table = workers[0].parts.directory._table  # noqa: SLF001
            met = [name for name in names if table.met(name) is not None]
            assert met == ["w7"]

    play(scenario, 1)


def test_fitted_exponents_are_those_of_the_curve() -> None:
    sizes = [
        Costs(workers, dict.fromkeys(FIGURES, 3.0 * workers**0.5))
        for workers in (64, 256, 1024)
    ]
    fitted = exponent(sizes, "end_s")
    assert fitted is not None
    assert math.isclose(fitted, 0.5)
    assert exponent(sizes[:1], "end_s") is None
    lines = markdown(sizes).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[-1].endswith("| 24 | 48 | 96 | 0.50 |")
