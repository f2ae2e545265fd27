"""The models that every side of `bench_serve` serves, and what is noted of them.

They are small enough for the web around them to matter: a batch of 32 rows takes a few
milliseconds on one core, a token a few as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import torch
from torch import nn

FEATURES: Final = 64
WIDTH: Final = 1024
CLASSES: Final = 10
BATCH_MAX: Final = 32
BATCH_WAIT_S: Final = 0.0  # a batch gathers while the one before it runs

VOCABULARY: Final = 1024
CONTEXT: Final = 32  # tokens that the language model sees
TOKENS: Final = 64  # of an answer, where a request says nothing else

# Where a model notes that it works on an answer, and that it has stopped.
NOTES: Final = "BENCH_SERVE_NOTES"
# Weights that are there only to be seen in the memory, in MiB.
BALLAST: Final = "BENCH_SERVE_BALLAST_MIB"


class Classifier(nn.Module):
    """Four layers, and as much memory as is wanted."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, CLASSES),
        )
        ballast_mib = int(os.environ.get(BALLAST, "0"))
        self.ballast = torch.ones(ballast_mib << 18)

    @torch.inference_mode()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return scores `(batch, classes)` of rows `(batch, features)`."""
        scores: torch.Tensor = self.layers(rows)
        return scores


class LanguageModel(nn.Module):
    """A transformer that has learned nothing, and takes as long as if it had."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(256, VOCABULARY)
        self.eval()

    def generate(self, tokens: int) -> Iterator[int]:
        """Yield so many tokens; note when the last one was worked on, and the end."""
        context = torch.zeros(1, CONTEXT, dtype=torch.long)
        with WorkNote() as note:
            for _ in range(tokens):
                note.worked()
                with torch.inference_mode():
                    hidden = self.layers(self.embedding(context))
                    token = int(self.head(hidden[0, -1]).argmax())
                    context = torch.cat((context[:, 1:], torch.tensor([[token]])), 1)
                yield token


class BatchedLanguageModel(LanguageModel):
    """The same, for several answers at once; an `asyncrpc.serving.SequenceModel`."""

    def enter(self, requests: list[int]) -> list[Sequence]:
        """Begin answers of so many tokens."""
        return [Sequence(tokens) for tokens in requests]

    @torch.inference_mode()
    def step(self, states: list[Sequence]) -> list[tuple[list[int], bool]]:
        """Make one token of each."""
        for one in states:
            one.note.worked()
        contexts = torch.stack([one.context for one in states])
        hidden = self.layers(self.embedding(contexts))
        tokens = self.head(hidden[:, -1]).argmax(-1).tolist()
        return [
            ([token], one.is_last(token))
            for token, one in zip(tokens, states, strict=True)
        ]

    def leave(self, state: Sequence) -> None:
        """End an answer."""
        state.note.ended()


class Sequence:
    """One answer that is being made."""

    def __init__(self, tokens: int) -> None:
        self.context = torch.zeros(CONTEXT, dtype=torch.long)
        self.note = WorkNote()
        self._left = tokens

    def is_last(self, token: int) -> bool:
        """Take the next token; return whether it is the last one."""
        self.context = torch.cat((self.context[1:], torch.tensor([token])))
        self._left -= 1
        return self._left <= 0


class WorkNote:
    """When a model last worked on an answer, in a file that the benchmark reads."""

    def __init__(self) -> None:
        path = os.environ.get(NOTES)
        self._path = Path(path) if path else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended()

    def ended(self) -> None:
        self._write("ended")

    def worked(self) -> None:
        self._write("working")

    def _write(self, word: str) -> None:
        if self._path is not None:  # the clock is that of all processes of the host
            self._path.write_text(f"{word} {time.monotonic()}", encoding="ascii")
