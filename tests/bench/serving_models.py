"""The models that every side of `bench_serve` serves, and what is noted of them.

They are small enough for the web around them to matter: a batch of 32 rows takes a few
milliseconds on one core, a token a few as well.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import nn

FEATURES: Final = 64
WIDTH: Final = 1024
CLASSES: Final = 10
BATCH_MAX: Final = 32
BATCH_WAIT_S: Final = 0.0  # a batch gathers while the one before it runs

VOCABULARY: Final = 1024
CONTEXT: Final = 32  # tokens that the language model sees
DIMENSIONS: Final = 512
HEADS: Final = 8
LAYERS: Final = 4
TOKENS: Final = 64  # of an answer, where a request says nothing else

# Where a model notes that it works on an answer, and that it has stopped.
NOTES: Final = "BENCH_SERVE_NOTES"
# Weights that are there only to be seen in the memory, in MiB.
BALLAST: Final = "BENCH_SERVE_BALLAST_MIB"


def arguments() -> argparse.Namespace:
    """Read what a side is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--web-workers", type=int, default=1)
    return parser.parse_args()


def run_uvicorn(app: str, options: argparse.Namespace) -> None:
    import uvicorn  # noqa: PLC0415  (not every side has it)

    uvicorn.run(
        app,
        port=options.port,
        workers=options.web_workers,
        timeout_worker_healthcheck=60,  # importing torch takes longer on a busy host
        log_level="warning",
        access_log=False,
    )


class Classifier(nn.Module):
    """Four layers, and as much memory as is wanted."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
            *(nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)),
        )
        ballast_mib = int(os.environ.get(BALLAST, "0"))
        self.ballast = torch.ones(ballast_mib << 18)

    @torch.inference_mode()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return scores `(batch, classes)` of rows `(batch, features)`."""
        scores: torch.Tensor = self.layers(rows)
        return scores


class LanguageModel(nn.Module):
    """A decoder with a cache, that has learned nothing, and takes as long as if it had.

    A step reads all weights, some 50 MB, whether it is for one sequence or for several.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, DIMENSIONS)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.head = nn.Linear(DIMENSIONS, VOCABULARY)

    @torch.inference_mode()
    def decode(self, sequences: list[Sequence]) -> list[int]:
        """Go one step with each sequence; return the next tokens."""
        hidden = self.embedding(
            torch.tensor([sequence.token for sequence in sequences])
        )
        caches = torch.stack([sequence.cache for sequence in sequences], 1)
        for number, layer in enumerate(self.layers):
            hidden, entries = layer(hidden, caches[number])
            for sequence, entry in zip(sequences, entries, strict=True):
                sequence.cache[number, :, sequence.position] = entry
        tokens: list[int] = self.head(hidden).argmax(-1).tolist()
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.take(token)
        return tokens

    def generate(self, tokens: int) -> Iterator[int]:
        """Yield so many tokens; note when the last one was worked on, and the end."""
        sequence = Sequence(tokens)
        try:
            while sequence.left:
                sequence.note.worked()
                yield self.decode([sequence])[0]
        finally:
            sequence.note.ended()


class DecoderLayer(nn.Module):
    """Attention to what is in a cache, and two layers more."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(DIMENSIONS, 3 * DIMENSIONS)
        self.out = nn.Linear(DIMENSIONS, DIMENSIONS)
        self.up = nn.Linear(DIMENSIONS, 4 * DIMENSIONS)
        self.down = nn.Linear(4 * DIMENSIONS, DIMENSIONS)

    def forward(
        self, hidden: torch.Tensor, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states `(batch, dimensions)`, and what the cache is to keep.

        Args:
            cache: keys and values `(batch, 2, tokens, dimensions)`.
        """
        query, key, value = self.query_key_value(hidden).chunk(3, -1)
        heads = (len(hidden), CONTEXT, HEADS, DIMENSIONS // HEADS)
        keys, values = (part.reshape(heads).transpose(1, 2) for part in cache.unbind(1))
        asked = query.reshape(len(hidden), HEADS, 1, DIMENSIONS // HEADS)
        attended = nn.functional.scaled_dot_product_attention(asked, keys, values)
        hidden = hidden + self.out(attended.reshape(hidden.shape))
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return hidden, torch.stack((key, value), 1)


class Sequence:
    """One answer that is being made."""

    def __init__(self, tokens: int) -> None:
        self.token = 0  # the last one
        self.left = tokens  # how many more are wanted
        # Keys and values `(layers, 2, tokens, dimensions)` of the last tokens.
        self.cache = torch.zeros(LAYERS, 2, CONTEXT, DIMENSIONS)
        self.note = WorkNote()  # says when it was worked on

    @property
    def position(self) -> int:
        """Where in the cache the next entry goes: the oldest one gives way."""
        return self.left % CONTEXT

    def take(self, token: int) -> None:
        """Take the next token."""
        self.token = token
        self.left -= 1


class BatchedLanguageModel(LanguageModel):
    """The same, for several answers at once; an `asyncrpc.serving.SequenceModel`."""

    def enter(self, requests: list[int]) -> list[Sequence]:
        return [Sequence(tokens) for tokens in requests]

    def step(self, states: list[Sequence]) -> list[tuple[list[int], bool]]:
        """Make one token of each."""
        for state in states:
            state.note.worked()
        tokens = self.decode(states)
        return [
            ([token], not state.left)
            for token, state in zip(tokens, states, strict=True)
        ]

    def leave(self, state: Sequence) -> None:
        state.note.ended()


class WorkNote:
    """When a model last worked on an answer, in a file that the benchmark reads."""

    def __init__(self) -> None:
        path = os.environ.get(NOTES)
        self._path = Path(path) if path else None

    def ended(self) -> None:
        self._write("ended")

    def worked(self) -> None:
        self._write("working")

    def _write(self, word: str) -> None:
        if self._path is not None:  # the clock is that of all processes of the host
            self._path.write_text(f"{word} {time.monotonic()}", encoding="ascii")
