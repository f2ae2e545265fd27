"""All observers are answered by one pass of the policy, and each by its own action."""

from __future__ import annotations

import argparse
import asyncio
import re
from typing import Any

import pytest
import torch

from asyncrpc import RRef
from asyncrpc.testing import Cluster, acting_as
from examples import batched_cartpole
from examples.batched_cartpole import Agent, Observer
from tests.examples.programs import run

OBSERVERS = 3
OPTIONS = argparse.Namespace(seed=0, gamma=0.9, lr=0.01, observers=OBSERVERS)


@pytest.mark.slow
def test_gathered_answers_need_a_pass_for_all_observers() -> None:
    arguments = ("--observers", "3", "--num-episodes", "2", "--num-steps", "120")
    printed = run("batched_cartpole.py", *arguments)
    alone = row("one by one", printed)
    gathered = row("gathered", printed)
    actions = 3 * 2 * 120
    assert alone["passes"] == actions
    # Exactly a third, but for observers that the machine held up for a second.
    assert actions // 3 <= gathered["passes"] <= actions // 3 + 20
    assert min(alone["mean reward"], gathered["mean reward"]) > 10.0


def row(way: str, output: str) -> dict[str, float]:
    """Return what the table at the end says of a way to answer."""
    match = re.search(
        rf"{way} +│ +([\d.]+) s │ +([\d,]+) │ +([\d,]+) │ +([\d.]+) │ +([\d.]+)", output
    )
    assert match is not None, output
    names = ("time", "actions/s", "passes", "actions a pass", "mean reward")
    values = (float(value.replace(",", "")) for value in match.groups())
    return dict(zip(names, values, strict=True))


async def played(steps: int, *, is_batched: bool) -> tuple[Agent, Any]:
    """Return the agent, and what it is told, after all observers took their steps."""
    names = ["agent", *(f"observer{index}" for index in range(OBSERVERS))]
    agent = Agent(OPTIONS)
    async with Cluster(names=names) as (worker, *_), agent.gather:
        with acting_as(worker):
            reference = RRef(agent)
            observers = [
                worker.peer(name).remote(Observer, rank)
                for rank, name in enumerate(names[1:], start=1)
            ]
            calls = (
                observer.rpc_async().run_episode(
                    reference, steps, is_batched=is_batched
                )
                for observer in observers
            )
            return agent, await asyncio.gather(*calls)


@pytest.mark.parametrize("is_batched", [False, True], ids=["alone", "gathered"])
async def test_an_observer_gets_its_own_action(*, is_batched: bool) -> None:
    """A push to the right, and nothing else, makes the cart go faster to the right."""
    agent, poles_of_all = await played(60, is_batched=is_batched)
    for asked, poles in zip(agent.asked, poles_of_all, strict=True):
        assert sum(len(rewards) for rewards in poles) == len(asked) == 60
        speeds = [float(state[1]) for state, _ in asked]
        first = 0
        for rewards in poles:
            steps = range(first, first + len(rewards) - 1)
            is_faster = [speeds[step + 1] > speeds[step] for step in steps]
            assert is_faster == [asked[step][1] == 1 for step in steps]
            first += len(rewards)
    assert agent.passes == (60 if is_batched else 60 * OBSERVERS)


async def test_late_observer_does_not_delay_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batched_cartpole, "PATIENCE_S", 0.01)
    agent = Agent(OPTIONS)
    async with agent.gather:
        states = torch.zeros(2, 4)
        await asyncio.gather(*map(agent.select_action_batch, (0, 2), states))
    assert agent.passes == 1
    assert [len(asked) for asked in agent.asked] == [1, 0, 1]
