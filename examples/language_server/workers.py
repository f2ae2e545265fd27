"""The processes behind the page: replicas, which write, and a trainer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import torch

import asyncrpc
from asyncrpc import serving
from examples.language_server.writer import (
    ALICE,
    Alphabet,
    Learner,
    Piece,
    Prompt,
    Writer,
    WriterSequences,
    WrittenText,
)

FRONT, REPLICAS, TRAINER = "front", "model-*", "trainer"
SLOTS = 16  # texts in a step of a replica
WAITING_MAX, MAX_QUEUE_AGE_S = 64, 10.0
READ_S = 3.0  # that a client has to take characters, before its place is given away
STEPS = 20  # of the trainer between two versions
GAP_S = 0.02  # the trainer leaves the cores to the replicas


def new_model() -> Writer:
    """Make the model that knows nothing yet, the same in every process."""
    torch.manual_seed(1)
    return Writer(len(Alphabet(ALICE.read_text("utf-8")).characters))


def told_to_end() -> asyncio.Event:
    """Return an event that is set once this process is told to end."""
    ending, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    return ending


async def left_by_front(worker: asyncrpc.Worker, ending: asyncio.Event) -> None:
    """Wait until the front is gone, which nobody else would tell; then end as well."""
    async for change in worker.members_changed():
        if change.member.name == FRONT and change.kind in {"left", "lost"}:
            ending.set()


# --- a replica -----------------------------------------------------------------------


class Replica:
    """What this process does, once it is a replica."""

    batcher: serving.ContinuousBatcher[Prompt, WrittenText, Piece]


async def write(prompt: Prompt) -> AsyncIterator[tuple[Piece, str]]:
    """Write a text; runs on a replica, and says on which."""
    name = asyncrpc.current_worker().name
    async with aclosing(Replica.batcher.generate(prompt)) as pieces:
        async for piece in pieces:
            yield piece, name


@dataclass(frozen=True)
class ReplicaFigures:
    """How a replica is doing.

    Attributes:
        writing: texts that it writes now.
        waiting: texts that wait for a place.
        rate: characters a second, of all texts.
    """

    writing: int
    waiting: int
    rate: float


@asyncrpc.on_loop
def figures() -> ReplicaFigures:
    """Return how this replica is doing."""
    stats = Replica.batcher.stats()
    requests = stats.requests
    rate = stats.items_per_s if requests.running else 0.0
    return ReplicaFigures(requests.running, requests.waiting, rate)


async def replicate(name: str, where: asyncrpc.JoinRendezvous) -> None:
    """Be a replica until this process is told to end."""
    ending = told_to_end()
    served = serving.ServedModel(new_model())
    sequences = WriterSequences(served)
    Replica.batcher = serving.ContinuousBatcher(
        sequences,
        SLOTS,
        items_max=256,
        pause_max_s=READ_S,
        waiting_max=WAITING_MAX,
        max_queue_age_s=MAX_QUEUE_AGE_S,
        warm_up=[[Prompt([0], 2, 1.0, 0)] * SLOTS],
    )
    async with (
        asyncrpc.Worker(name, rendezvous=where) as worker,
        Replica.batcher,
        serving.Replica(worker, model=served, ready=False) as replica,
    ):
        watching = asyncio.create_task(left_by_front(worker, ending))
        await serving.catch_up(served, REPLICAS)
        replica.make_ready()
        await ending.wait()
        watching.cancel()


# --- the trainer ---------------------------------------------------------------------


class Training:
    """What this process does, if it is the trainer."""

    steps = 0
    perplexity = 0.0
    may_publish = True


@asyncrpc.on_loop
def progress() -> tuple[int, float]:
    """Return how many steps the trainer has done, and the perplexity of the last."""
    return Training.steps, Training.perplexity


@asyncrpc.on_loop
def let_publish(*, may: bool) -> None:
    """Let the trainer publish what it learns, or keep it to itself."""
    Training.may_publish = may


async def train(name: str, where: asyncrpc.JoinRendezvous) -> None:
    """Learn, and publish what was learned, until this process is told to end."""
    ending = told_to_end()
    model = new_model()
    learner = Learner(model, Alphabet(text := ALICE.read_text("utf-8")).encode(text))
    async with asyncrpc.Worker(name, rendezvous=where) as worker:
        publisher = serving.Publisher(worker, REPLICAS)
        watching = asyncio.create_task(left_by_front(worker, ending))
        while not ending.is_set():
            for _ in range(STEPS):
                Training.perplexity = await asyncio.to_thread(learner.learn)
                Training.steps = learner.steps
                await asyncio.sleep(GAP_S)
            if Training.may_publish:
                try:
                    await publisher.publish(model)
                except asyncrpc.AsyncRpcError as error:
                    print(f"version not published: {error}", flush=True)
        watching.cancel()


def run_worker(name: str, contact: str) -> None:
    """Be the worker of this name."""
    torch.set_num_threads(1)
    work = train if name == TRAINER else replicate
    asyncrpc.run(work(name, asyncrpc.JoinRendezvous([contact])))
