"""A language model of characters: how it learns, and how it writes many texts."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from asyncrpc import serving

ALICE = Path(__file__).parent.parent / "data" / "alice.txt"
WIDTH, HIDDEN = 32, 192
COLUMNS, LENGTH = 16, 48  # of a batch to learn from: texts, and characters of each
READ_MAX = 200  # characters of a prompt that the model reads, the last ones


class Alphabet:
    """The characters of the text, as numbers."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        self._codes = {
            character: code for code, character in enumerate(self.characters)
        }

    def encode(self, text: str) -> list[int]:
        """Return the codes of a text.

        Raises:
            ValueError: the model does not know a character.
        """
        unknown = sorted(set(text) - self._codes.keys())
        if unknown:
            raise ValueError(f"the model does not know {' '.join(unknown)!r}")
        return [self._codes[character] for character in text]


class Writer(nn.Module):
    """Tells which character may follow."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.gru = nn.GRU(WIDTH, HIDDEN, batch_first=True)
        self.decoder = nn.Linear(HIDDEN, characters)

    def forward(
        self, codes: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores `(texts, length, characters)`, and the state after it.

        Args:
            codes: `(texts, length)`.
            state: `(1, texts, hidden)`.
        """
        hidden, state = self.gru(self.embedding(codes), state)
        return self.decoder(hidden), state


class Learner:
    """Trains a model on the text, one batch at a time."""

    def __init__(self, model: Writer, codes: list[int]) -> None:
        rows = (len(codes) - 1) // COLUMNS
        cut = torch.tensor(codes[: rows * COLUMNS + 1])
        self._here = cut[:-1].view(COLUMNS, rows)
        self._next = cut[1:].view(COLUMNS, rows)
        self._model, self._at = model, 0
        self._state: torch.Tensor | None = None
        self._optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
        self.steps = 0

    def learn(self) -> float:
        """Do one step; return the perplexity of its batch."""
        if self._at + LENGTH > self._here.shape[1]:
            self._at, self._state = 0, None
        part = slice(self._at, self._at + LENGTH)
        scores, state = self._model(self._here[:, part], self._state)
        loss = nn.functional.cross_entropy(
            scores.flatten(0, 1), self._next[:, part].flatten()
        )
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._at, self._state = self._at + LENGTH, state.detach()
        self.steps += 1
        return math.exp(loss.item())


@dataclass(frozen=True)
class Prompt:
    """What a client asks for.

    Attributes:
        codes: of the text to go on from.
        length: characters to write.
        boldness: the higher, the more often it writes what is less likely.
        seed: of its chance.
    """

    codes: list[int]
    length: int
    boldness: float
    seed: int


@dataclass(frozen=True)
class Piece:
    """What a step writes of one text: a character, and the version that chose it."""

    code: int
    version: int


class WrittenText:
    """One text that is being written, to its end by the version that began it."""

    def __init__(self, prompt: Prompt, current: serving.ServedVersion[Writer]) -> None:
        self.model, self.version = current.model, current.number
        self.left = prompt.length
        self._boldness = prompt.boldness
        self._chance = torch.Generator().manual_seed(prompt.seed)
        scores, state = self.model(torch.tensor([prompt.codes[-READ_MAX:]]))
        self.take(state, scores[0, -1])

    def take(self, state: torch.Tensor, scores: torch.Tensor) -> None:
        """Choose the next character by its scores, `(characters,)`.

        Args:
            state: `(1, 1, hidden)`, after the characters before it.
            scores: of all characters.
        """
        odds = torch.softmax(scores / self._boldness, dim=0)
        self.code = int(torch.multinomial(odds, 1, generator=self._chance))
        self.state = state


class WriterSequences:
    """The model as a `ContinuousBatcher` uses it: a step writes a character of each."""

    def __init__(self, served: serving.ServedModel[Writer]) -> None:
        self._served = served

    @torch.inference_mode()
    def enter(self, prompts: list[Prompt]) -> list[WrittenText]:
        """Read the prompts, by the version that is served now."""
        with self._served.batch() as current:
            return [WrittenText(prompt, current) for prompt in prompts]

    @torch.inference_mode()
    def step(self, texts: list[WrittenText]) -> list[tuple[list[Piece], bool]]:
        """Write one character of each text."""
        written = [Piece(text.code, text.version) for text in texts]
        by_version = defaultdict(list)
        for text in texts:
            text.left -= 1
            if text.left > 0:
                by_version[text.version].append(text)
        for group in by_version.values():
            codes = torch.tensor([[text.code] for text in group])
            states = torch.cat([text.state for text in group], dim=1)
            scores, states = group[0].model(codes, states)
            for number, text in enumerate(group):
                text.take(states[:, number : number + 1], scores[number, 0])
        ends = (text.left <= 0 for text in texts)
        return [([piece], ended) for piece, ended in zip(written, ends, strict=True)]

    def leave(self, text: WrittenText) -> None:
        """Keep nothing of a text that is over."""
