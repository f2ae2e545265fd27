"""Let many processes play and learn at once, with one policy in shared memory: A3C.

    $ python examples/async_actor_learner.py
    $ python examples/async_actor_learner.py --processes 4 --steps 60000

Every process plays CartPole with a copy of the policy that is a few steps old, computes
gradients on its own, and has the optimizer apply them to the parameters that all share,
without a lock.  The optimizer's state is shared, too.  Returns come through a queue.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from statistics import fmean

import gymnasium
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

import asyncrpc
from asyncrpc.errors import ProcessFailedError
from asyncrpc.multiprocessing import Queue, launch

GAMMA = 0.99  # what a reward loses in a step
ENTROPY = 0.01  # how much a policy that is still open is worth
COPY_EVERY = 40  # steps between two updates


class ActorCritic(nn.Module):
    """From a `(4,)` state to the scores of two actions, and what is to come."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 128), nn.Tanh())
        self.actor, self.critic = nn.Linear(128, 2), nn.Linear(128, 1)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.body(states)
        return self.actor(seen).log_softmax(-1), self.critic(seen).squeeze(-1)


class SharedAdam(torch.optim.Adam):
    """Adam whose moments are made at once, so that they can be shared."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), lr)
        for parameter in model.parameters():
            self.state[parameter] = {
                name: asyncrpc.share(torch.zeros_like(like))
                for name, like in (
                    ("step", torch.tensor(0.0)),
                    ("exp_avg", parameter.data),
                    ("exp_avg_sq", parameter.data),
                )
            }


Step = tuple[torch.Tensor, int, float, bool]  # state, action, reward, whether it ended


def loss_of(model: ActorCritic, steps: list[Step], rest: float) -> torch.Tensor:
    """Return the loss of an actor and a critic; `rest` is what is still to come."""
    states, actions, rewards, ends = zip(*steps, strict=True)
    returns: list[float] = []
    for reward, is_over in zip(reversed(rewards), reversed(ends), strict=True):
        rest = reward + (0.0 if is_over else GAMMA * rest)
        returns.append(rest)
    scores, expected = model(torch.stack(states))
    chosen = scores.gather(1, torch.tensor(actions)[:, None]).squeeze(1)
    advantages = torch.tensor(returns[::-1]) - expected
    entropy = -(scores.exp() * scores).sum(1)
    surprise: torch.Tensor = -(chosen * advantages.detach()) - ENTROPY * entropy
    return torch.mean(surprise + 0.5 * advantages**2)


def act(
    rank: int,
    shared: tuple[ActorCritic, SharedAdam],
    results: Queue[float | None],
    options: argparse.Namespace,
) -> None:
    """Play and learn; put the return of every episode, and None at the end."""
    torch.manual_seed(options.seed + rank)
    theirs, optimizer = shared
    environment, model, total = gymnasium.make("CartPole-v1"), ActorCritic(), 0.0
    state, _ = environment.reset(seed=options.seed + rank)
    for _ in range(options.steps // options.processes // COPY_EVERY):
        model.load_state_dict(theirs.state_dict())
        steps: list[Step] = []
        for _ in range(COPY_EVERY):
            seen = torch.from_numpy(state)
            with torch.no_grad():
                action = int(torch.multinomial(model(seen)[0].exp(), 1))
            state, reward, fell, is_late, _ = environment.step(action)
            steps.append((seen, action, float(reward), fell or is_late))
            total += float(reward)
            if fell or is_late:
                results.put(total)
                (state, _), total = environment.reset(), 0.0
        with torch.no_grad():
            rest = model(torch.from_numpy(state))[1].item()
        loss = loss_of(model, steps, rest)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient  # this process's own
        nn.utils.clip_grad_norm_(theirs.parameters(), 5.0)
        optimizer.step()  # on what all have
    results.put(None)


def watch(
    results: Queue[float | None], options: argparse.Namespace, console: Console
) -> list[float]:
    """Show the returns as they come, until all processes are done; return them."""
    returns: list[float] = []
    running = options.processes
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("playing", total=options.steps)
        while running:
            if (result := results.get()) is None:
                running -= 1
                continue
            returns.append(result)
            text = f"{len(returns)} episodes, mean return {fmean(returns[-50:]):.1f}"
            bars.update(bar, completed=sum(returns), description=text)
            if not console.is_terminal and len(returns) % 100 == 0:
                console.print(text)
    return returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40_000, help="of all processes")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=1)
    options, console = parser.parse_args(), Console()
    torch.manual_seed(options.seed)
    model = asyncrpc.share(ActorCritic())
    results: Queue[float | None] = Queue()
    arguments = ((model, SharedAdam(model, options.lr)), results, options)
    multiprocessing.set_forkserver_preload(["torch", "gymnasium", "asyncrpc"])
    try:
        with launch(
            act, arguments, options.processes, method="forkserver", join=False
        ) as processes:
            returns = watch(results, options, console)
            processes.wait()
    except ProcessFailedError as error:
        sys.exit(f"playing failed: {error}")
    means = [fmean(returns[at : at + 50]) for at in range(max(1, len(returns) - 49))]
    console.print(f"{len(returns)} episodes by {options.processes} processes")
    console.print(
        f"mean return of the first 50: {means[0]:.1f}, of the last 50: {means[-1]:.1f},"
        f" of the best 50 in a row: {max(means):.1f}"
    )


if __name__ == "__main__":
    main()
