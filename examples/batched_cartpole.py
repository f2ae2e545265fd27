"""Ask a policy for many actions at once, and see what that saves.

    $ python examples/batched_cartpole.py
    $ python examples/batched_cartpole.py --observers 4 --num-episodes 40

`agent` owns a policy; `observer1`, `observer2`, ... play CartPole and ask it for every
action, all at the same time.  They play twice, each time with a policy that knows
nothing yet: answered one by one, and then gathered, so that one pass of the policy
answers all observers.  A coroutine function makes that easy: it waits for the others,
and while it does, no thread is held.

In an episode here every observer takes `--num-steps` steps, and puts the pole up again
when it falls.  So all ask equally often, and a batch is never waited for in vain.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import gymnasium
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import asyncrpc
from asyncrpc import RRef
from asyncrpc.errors import ProcessFailedError
from asyncrpc.multiprocessing import launch
from asyncrpc.serving import Batcher

WAYS = ONE_BY_ONE, GATHERED = "one by one", "gathered"
PATIENCE_S = 1.0  # then a batch goes without an observer that is late


class Agent:
    """The policy, and what it was asked in this episode."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.gamma = options.gamma
        self.policy = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), options.lr)
        self.asked: list[list[tuple[torch.Tensor, int]]]
        self.asked = [[] for _ in range(options.observers)]
        self.gather = Batcher(self.decide, options.observers, PATIENCE_S)
        self.passes = 0

    async def decide(self, asked: Sequence[tuple[int, torch.Tensor]]) -> list[int]:
        """Draw an action for the `(4,)` state of each observer that has asked."""
        states = torch.stack([state for _, state in asked])
        with torch.no_grad():
            chances = self.policy(states).softmax(-1)
        actions: list[int] = torch.multinomial(chances, 1).flatten().tolist()
        for (observer, state), action in zip(asked, actions, strict=True):
            self.asked[observer].append((state, action))
        self.passes += 1
        return actions

    async def select_action(self, observer: int, state: torch.Tensor) -> int:
        """Answer one observer."""
        return (await self.decide([(observer, state)]))[0]

    async def select_action_batch(self, observer: int, state: torch.Tensor) -> int:
        """Answer one observer when all have asked."""
        return await self.gather((observer, state))

    def learn(self, played: Sequence[Sequence[Sequence[float]]]) -> None:
        """Take a step of REINFORCE; `played` are the rewards by observer and pole."""
        steps = [*itertools.chain(*self.asked)]
        states = torch.stack([state for state, _ in steps])
        actions = torch.tensor([[action] for _, action in steps])
        poles = itertools.chain(*played)
        returns = torch.cat([discounted(rewards, self.gamma) for rewards in poles])
        advantages = (returns - returns.mean()) / (returns.std(correction=0) + 1e-6)
        chosen = self.policy(states).log_softmax(1).gather(1, actions).squeeze(1)
        self.optimizer.zero_grad()
        (-chosen * advantages).mean().backward()
        self.optimizer.step()
        for asked in self.asked:
            asked.clear()


class Observer:
    """A pole, and what happens to it; it does not know the policy."""

    def __init__(self, rank: int) -> None:
        self.index = rank - 1
        self.environment = gymnasium.make("CartPole-v1")

    def begin(self, seed: int) -> None:
        """Have the same poles to come as whenever this was called with this seed."""
        self.environment.reset(seed=seed + self.index)

    async def run_episode(
        self, agent: RRef[Agent], steps: int, *, is_batched: bool
    ) -> list[list[float]]:
        """Take so many steps as the agent says; return the rewards of each pole."""
        proxy = agent.rpc_async()
        select = proxy.select_action_batch if is_batched else proxy.select_action
        poles: list[list[float]] = []
        is_over = True
        for _ in range(steps):
            if is_over:
                state, _ = self.environment.reset()
                poles.append([])
            action = await select(self.index, torch.from_numpy(state))
            state, reward, fell, is_late, _ = self.environment.step(action)
            poles[-1].append(float(reward))
            is_over = fell or is_late
        return poles


@dataclass(frozen=True, slots=True)
class Played:
    """What one way of answering has come to so far."""

    episodes: int
    took_s: float
    actions: int
    passes: int
    reward: float  # of a pole, in the last episode


def discounted(rewards: Sequence[float], gamma: float) -> torch.Tensor:
    """Return what is still to come at each step, later rewards counting less."""
    sums = itertools.accumulate(reversed(rewards), lambda rest, now: now + gamma * rest)
    return torch.tensor([*sums]).flip(0)


async def play(
    options: argparse.Namespace,
    observers: Sequence[RRef[Observer]],
    *,
    is_batched: bool,
) -> AsyncIterator[Played]:
    """Let a new agent learn from all observers; say after each episode how it goes."""
    agent = Agent(options)
    arguments = (RRef(agent), options.num_steps)
    await asyncio.gather(
        *(observer.rpc_async().begin(options.seed) for observer in observers)
    )
    begun = time.perf_counter()
    actions = 0
    async with agent.gather:
        for episode in range(1, options.num_episodes + 1):
            proxies = [observer.rpc_async() for observer in observers]
            calls = (
                proxy.run_episode(*arguments, is_batched=is_batched)
                for proxy in proxies
            )
            played = await asyncio.gather(*calls)
            agent.learn(played)
            rewards = [sum(rewards) for poles in played for rewards in poles]
            actions += len(observers) * options.num_steps
            took_s = time.perf_counter() - begun
            yield Played(episode, took_s, actions, agent.passes, fmean(rewards))


async def drive(options: argparse.Namespace, console: Console) -> None:
    """Be the agent: play in both ways, and say what each took."""
    ranks = range(1, options.observers + 1)
    observers = [asyncrpc.remote(name_of(rank), Observer, (rank,)) for rank in ranks]
    results = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        for way in WAYS:
            bar = bars.add_task(way, total=options.num_episodes)
            async for so_far in play(options, observers, is_batched=way == GATHERED):
                results[way] = so_far
                episode, reward = so_far.episodes, so_far.reward
                text = f"{way:10}  episode {episode:3}, mean reward {reward:5.1f}"
                bars.update(bar, completed=episode, description=text)
                if not console.is_terminal and episode % options.log_interval == 0:
                    console.print(text)
    console.print(table_of(results))
    faster = results[ONE_BY_ONE].took_s / results[GATHERED].took_s
    console.print(
        f"{options.observers} observers: gathered is {faster:.1f} times as fast"
    )


def table_of(results: Mapping[str, Played]) -> Table:
    """Return a row for each way."""
    table = Table("answers")
    for title in ("time", "actions/s", "passes", "actions a pass", "mean reward"):
        table.add_column(title, justify="right")
    for way, result in results.items():
        table.add_row(
            way,
            f"{result.took_s:.2f} s",
            f"{result.actions / result.took_s:,.0f}",
            f"{result.passes:,}",
            f"{result.actions / result.passes:.1f}",
            f"{result.reward:.1f}",
        )
    return table


def name_of(rank: int) -> str:
    """Return the name of a worker."""
    return f"observer{rank}" if rank else "agent"


async def work(rank: int, options: argparse.Namespace) -> None:
    """Be one of the workers: what each process runs."""
    async with asyncrpc.init_rpc(name_of(rank)):
        if rank == 0:
            await drive(options, Console())
        await asyncrpc.shutdown()  # waits for the others, and serves them meanwhile


def main() -> None:
    """Read the options, and start the processes."""
    parser = argparse.ArgumentParser(description="Ask a policy for actions in batches.")
    option = parser.add_argument
    option("--observers", type=int, default=8, help="processes that play")
    option("--num-episodes", "--num_episodes", type=int, default=20, help="each way")
    option("--num-steps", "--num_steps", type=int, default=200, help="of an episode")
    option("--seed", type=int, default=543)
    option("--gamma", type=float, default=0.99, help="what a reward loses in a step")
    option("--lr", type=float, default=0.01)
    option("--log-interval", "--log_interval", type=int, default=5)
    option("--quick", action="store_true", help="three observers, four episodes")
    options = parser.parse_args()
    if min(options.observers, options.num_episodes, options.num_steps) < 1:
        parser.error("--observers, --num-episodes and --num-steps are at least 1")
    if options.quick:
        options.observers, options.num_episodes = 3, 4
    # Imported once, instead of in every process.
    multiprocessing.set_forkserver_preload(["torch", "gymnasium", "asyncrpc.serving"])
    try:
        launch(work, args=(options,), nprocs=options.observers + 1, method="forkserver")
    except ProcessFailedError as error:
        sys.exit(f"playing failed: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")


if __name__ == "__main__":
    main()
