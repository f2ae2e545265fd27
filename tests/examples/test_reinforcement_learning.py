"""Agents learn to balance the pole, and a seed gives one run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from asyncrpc import RRef
from asyncrpc.testing import Cluster, acting_as
from examples.reinforcement_learning import Agent, Observer, discounted
from tests.examples.programs import run

OPTIONS = argparse.Namespace(seed=0, gamma=0.9, lr=0.01, world_size=3)
STATE = torch.tensor([0.0, 0.1, 0.2, -0.1])


def reward(which: str, output: str) -> float:
    """Return what the table at the end says of some episodes."""
    match = re.search(rf"{which} +│ +[\d,]+ │ +([\d.]+)", output)
    assert match is not None, output
    return float(match[1])


@pytest.mark.slow
def test_agent_learns_to_balance_the_pole() -> None:
    """A pole pushed at random stands for 20 steps."""
    printed = run(
        "reinforcement_learning.py", "--num-episodes", "600", "--enough", "150"
    )
    assert reward("last", printed) >= 150.0 > 2.0 * reward("first", printed)


def test_future_rewards_are_discounted() -> None:
    assert discounted([1.0, 2.0, 4.0], 0.5).tolist() == [3.0, 4.0, 4.0]


async def play(rounds: int, order: Sequence[int]) -> tuple[Agent, Any]:
    """Return the agent before it learns from the last of some rounds, and its rewards.

    Args:
        rounds: how many; two observers play an episode in each.
    """
    async with Cluster(names=("agent", "observer1", "observer2")) as (worker, *_):
        with acting_as(worker):
            agent = Agent(OPTIONS)
            reference = RRef(agent)
            observers = [
                worker.peer(f"observer{index + 1}").remote(Observer, index, 0)
                for index in range(2)
            ]
            for left in reversed(range(rounds)):
                calls = {
                    index: observers[index].rpc_async().run_episode(reference)
                    for index in order
                }
                rewards = [await calls[index] for index in range(2)]
                if left:
                    agent.learn(rewards)
            return agent, rewards


async def test_an_observer_gets_its_own_actions() -> None:
    """A push to the right, and nothing else, makes the cart go faster to the right."""
    agent, rewards = await play(1, order=(0, 1))
    for asked, episode in zip(agent.asked, rewards, strict=True):
        assert len(asked) == len(episode)
        speeds = torch.stack([state for state, _ in asked])[:, 1]
        actions = [action for _, action in asked]
        assert (speeds.diff() > 0).int().tolist() == actions[:-1]


async def test_seed_gives_one_run_in_any_order_of_observers() -> None:
    agent, rewards = await play(5, order=(0, 1))
    other, same_rewards = await play(5, order=(1, 0))
    assert same_rewards == rewards
    pairs = zip(agent.policy.parameters(), other.policy.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_agent_prefers_rewarded_actions() -> None:
    agent = Agent(OPTIONS)
    # The first observer's pole stood longer.
    agent.asked = [[(STATE, 1)] * 10, [(STATE, 0)] * 2]
    before = agent.policy(STATE).softmax(-1)
    agent.learn([[1.0] * 10, [1.0] * 2])
    after = agent.policy(STATE).softmax(-1)
    assert after[1] > before[1]


@pytest.mark.slow
def test_returns_grow_during_training() -> None:
    printed = run("async_actor_learner.py", "--processes", "2", "--steps", "20000")
    best = re.search(r"of the best 50 in a row: ([\d.]+)", printed)
    assert best is not None, printed
    # A pole that is pushed at random stays up for 22 steps.  Which of two processes
    # comes first is chance, so what was learned may be lost again before the end.
    assert float(best[1]) > 1.5 * 22
