"""Train a language model whose layers are on two workers, then let it write.

    $ python examples/language_model.py

`tables` owns the layers that grow with the alphabet, `trainer` the LSTM between them:

    text -> embedding -> LSTM -> decoder -> loss
            (tables)   (trainer) (tables)   (trainer)

So every pass goes to `tables` twice, forward and backward, and one optimizer steps on
both workers.  It clips the norm that all gradients have together, as an LSTM needs it.

The text is in `data/`.  Perplexity is among how many characters the model hesitates: of
the 66 there are, one that knows nothing hesitates among all.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import asyncrpc
from asyncrpc import RRef, autograd
from asyncrpc.multiprocessing import launch
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer

NAMES = ("trainer", "tables")  # by rank
ALICE = Path(__file__).parent / "data" / "alice.txt"
TRAINED_ON = 0.9  # of the text, from its beginning; the rest is held out
COLUMNS = ("epoch", "training", "held out", "clipped", "characters/s")
State = tuple[torch.Tensor, torch.Tensor] | None  # the LSTM's, (1, batch, hidden) each


class Text:
    """A text as numbers, and what it takes to read them."""

    def __init__(self, path: Path) -> None:
        text = path.read_text("utf-8")
        self.alphabet = sorted(set(text))
        self.codes = {character: code for code, character in enumerate(self.alphabet)}
        codes, cut = self.encode(text), int(TRAINED_ON * len(text))
        self.training, self.held_out = codes[:cut], codes[cut:]

    def encode(self, text: str) -> torch.Tensor:
        """Return the codes of characters, `(length,)`."""
        return torch.tensor([self.codes[character] for character in text])

    def perplexity_by_frequency(self) -> float:
        """Return that of the held-out part if only frequencies were known."""
        counts, total = Counter(self.training.tolist()), len(self.training)
        unseen = len(self.alphabet)  # one more of each, so that nothing is impossible
        losses = [
            -math.log((counts[code] + 1) / (total + unseen))
            for code in self.held_out.tolist()
        ]
        return math.exp(sum(losses) / len(losses))


def batches(
    codes: torch.Tensor, columns: int, length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield characters and those that follow them, `(length, columns)` each.

    Each column is a piece of the text, and goes on in the next batch where it stopped.
    """
    rows = (len(codes) - 1) // columns
    end = rows * columns
    here, next_ = (
        part.view(columns, rows).t() for part in (codes[:end], codes[1:][:end])
    )
    pieces = (torch.split(part, length) for part in (here, next_))
    yield from zip(*pieces, strict=True)


def embedding(characters: int, width: int) -> nn.Module:
    """Make the first layer; runs on `tables`."""
    torch.manual_seed(1)
    return nn.Embedding(characters, width)


def decoder(hidden: int, characters: int) -> nn.Module:
    """Make the last layer; runs on `tables`."""
    torch.manual_seed(2)
    return nn.Linear(hidden, characters)


class Model:
    """The trainer's view of the model."""

    def __init__(self, characters: int, options: argparse.Namespace) -> None:
        torch.manual_seed(3)
        width, hidden = options.width, options.hidden
        self.embedding = RemoteModule("tables", embedding, (characters, width))
        self.lstm = nn.LSTM(width, hidden)
        self.decoder = RemoteModule("tables", decoder, (hidden, characters))

    async def parameters(self) -> list[RRef[nn.Parameter]]:
        """Return references to all parameters, here and there."""
        references = [RRef(parameter) for parameter in self.lstm.parameters()]
        references += await self.embedding.remote_parameters()
        return references + await self.decoder.remote_parameters()

    async def forward(
        self, codes: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the scores of what follows each character, and the LSTM's state."""
        hidden, state = self.lstm(await self.embedding.forward_async(codes), state)
        return await self.decoder.forward_async(hidden), state

    async def loss(
        self, codes: torch.Tensor, following: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State]:
        """Return the mean loss of a batch, and the state, of which no graph is kept."""
        scores, state = await self.forward(codes, state)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())
        return loss, (state[0].detach(), state[1].detach())

    async def perplexity(self, codes: torch.Tensor, length: int) -> float:
        """Return that of a text.  Outside of contexts nothing is recorded."""
        state, total, count = None, 0.0, 0
        for here, following in batches(codes, 1, length):
            loss, state = await self.loss(here, following, state)
            total, count = total + loss.item() * len(here), count + len(here)
        return math.exp(total / count)

    async def write(self, text: Text, start: str, length: int) -> str:
        """Go on from `start`, a character at a time, by chance."""
        chance = torch.Generator().manual_seed(4)
        written, codes, state = start, text.encode(start)[:, None], None
        for _ in range(length):
            scores, state = await self.forward(codes, state)
            state = (state[0].detach(), state[1].detach())
            # Divided by less than 1: what is likely becomes likelier.
            odds = torch.softmax(scores.detach()[-1, 0] / 0.6, dim=0)
            codes = torch.multinomial(odds, 1, generator=chance)[None]
            written += text.alphabet[int(codes)]
        return written


async def train(
    model: Model, text: Text, options: argparse.Namespace, console: Console
) -> Table:
    """Train, and return how each epoch went."""
    optimizer = DistributedOptimizer(
        torch.optim.Adam, await model.parameters(), lr=options.lr
    )
    known = list(batches(text.training, options.batch_size, options.length))
    table = Table(*COLUMNS, title="perplexity per character")
    shown = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*shown, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("starting", total=options.epochs * len(known))
        for epoch in range(1, options.epochs + 1):
            state: State = None
            total, clipped, begun = 0.0, 0, time.perf_counter()
            for codes, following in known:
                async with autograd.context() as ctx:
                    loss, state = await model.loss(codes, following, state)
                    await autograd.backward(ctx, [loss])
                    done = await optimizer.step(ctx, clip_grad_norm=options.clip)
                assert done.grad_norm is not None
                clipped += done.grad_norm > options.clip
                total += loss.item() * codes.numel()
                bars.advance(bar)
            count = sum(codes.numel() for codes, _ in known)
            speed = count / (time.perf_counter() - begun)
            held_out = await model.perplexity(text.held_out, options.length)
            row = (f"{math.exp(total / count):.2f}", f"{held_out:.2f}")
            table.add_row(
                f"{epoch}", *row, f"{clipped / len(known):.0%}", f"{speed:,.0f}"
            )
            bars.update(bar, description=f"epoch {epoch}, perplexity {row[0]}")
    return table


async def work(rank: int, options: argparse.Namespace) -> None:
    """Be one of the two workers: what each process runs."""
    async with asyncrpc.init_rpc(NAMES[rank]):
        if NAMES[rank] == "trainer":
            console, text = Console(), Text(options.text)
            size, by_chance = len(text.alphabet), text.perplexity_by_frequency()
            known = f"{len(text.training):,} characters to learn from, {size} different"
            console.print(f"{known}; by frequency alone, perplexity {by_chance:.2f}")
            model = Model(size, options)
            console.print(await train(model, text, options, console))
            written = await model.write(text, options.start, options.write)
            console.print(written, markup=False, highlight=False)
        await asyncrpc.shutdown()  # `tables` serves until `trainer` is here too


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a language model on 2 workers.")
    parser.add_argument("--text", type=Path, default=ALICE, help="a file in UTF-8")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=32, help="characters a step")
    parser.add_argument("--width", type=int, default=32, help="of the embedding")
    parser.add_argument("--hidden", type=int, default=128, help="of the LSTM")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=0.3, help="norm of the gradients")
    parser.add_argument("--write", type=int, default=300, help="characters at the end")
    parser.add_argument("--start", default="Alice ", help="what it goes on from")
    parser.add_argument("--quick", action="store_true", help="two epochs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.epochs = 2
    known_characters = set(arguments.text.read_text("utf-8"))
    if not arguments.start or not known_characters.issuperset(arguments.start):
        parser.error("--start is empty, or has characters that the text has not")
    # One process imports this; the others are forked from it.
    multiprocessing.set_forkserver_preload(["asyncrpc", "rich.progress"])
    launch(work, args=(arguments,), nprocs=len(NAMES), method="forkserver")
