"""A small language model with a cache of keys and values, for several sequences.

It computes in float64: what else is in the batch changes a logit by 1e-15, and never
which token is likeliest.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from asyncrpc import expose
from asyncrpc.serving import ContinuousBatcher

VOCABULARY, WIDTH, HEADS, LAYERS, END = 61, 32, 4, 2, 0


@dataclass(frozen=True)
class Prompt:
    """What to go on from, and how far."""

    tokens: tuple[int, ...]
    length: int  # at most so many tokens follow


@dataclass(eq=False)
class Written:
    """The state of a sequence: its cache, and what is to come."""

    length: int
    # By layer: keys and values, `(tokens, heads, width of a head)`.
    cache: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    next: int = END
    written: int = 0

    @property
    def tokens(self) -> int:
        """How many are in the cache."""
        return len(self.cache[0][0])


class Block(nn.Module):
    """Attention to what came before, and a layer for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def queries(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values of each token."""
        found: torch.Tensor = self.project(self.first(hidden))
        return found.chunk(3, dim=-1)

    def after(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return what comes after what was attended to."""
        hidden = hidden + self.out(attended)
        inner = functional.gelu(self.inner(self.second(hidden)))
        return torch.add(hidden, self.outer(inner))


class LanguageModel(nn.Module):
    """A decoder; random weights that are the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for parameter in self.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 0.35)

    def forward(self, tokens: torch.Tensor, states: list[Written]) -> torch.Tensor:
        """Return the logits that follow the last token of each sequence.

        Args:
            tokens: the new ones, `(sequences, new)`.
            states: their caches, which grow.
        """
        new = tokens.shape[1]
        begun = [len(state.cache[0][0]) if state.cache else 0 for state in states]
        at = torch.stack([torch.arange(one, one + new) for one in begun])
        hidden = self.embedding(tokens) + self.places(at)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            q, k, v = block.queries(hidden)
            attended = [
                self._attend(index, state, q[row], k[row], v[row])
                for row, state in enumerate(states)
            ]
            hidden = block.after(hidden, torch.stack(attended))
        logits: torch.Tensor = self.head(hidden[:, -1])
        return logits

    @staticmethod
    def _attend(
        index: int, state: Written, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        new = len(q)
        q, k, v = (one.view(new, HEADS, -1) for one in (q, k, v))
        if index < len(state.cache):
            keys, values = state.cache[index]
            keys, values = torch.cat([keys, k]), torch.cat([values, v])
            state.cache[index] = keys, values
        else:
            keys, values = k, v
            state.cache.append((keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(q.shape[-1])
        old = len(keys) - new
        allowed = torch.arange(len(keys)) <= torch.arange(new)[:, None] + old
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(new, -1)


class Decoder:
    """The model, as a batcher wants it; it counts what it holds.

    Attributes:
        tokens_max: the most tokens that all caches together have ever had.
        inside: states that have not left.
        sizes: of the steps.
        is_empty: nothing is inside, after something was.
    """

    def __init__(self) -> None:
        self.model = LanguageModel().double().eval()
        self.inside: set[Written] = set()
        self.tokens_max = 0
        self.sizes: list[int] = []
        self.is_empty = asyncio.Event()

    @torch.inference_mode()
    def enter(self, prompts: list[Prompt]) -> list[Written | Exception]:
        """Read the prompts; one without a token fails."""
        found: list[Written | Exception] = []
        for prompt in prompts:
            if not prompt.tokens:
                found.append(ValueError("a prompt has at least one token"))
                continue
            state = Written(prompt.length)
            logits = self.model(torch.tensor([prompt.tokens]), [state])
            state.next = int(logits[0].argmax())
            self.inside.add(state)
            self.is_empty.clear()
            found.append(state)
        self._count()
        return found

    @torch.inference_mode()
    def step(self, states: list[Written]) -> list[tuple[list[int], bool]]:
        """Write a token of each, and find the next one."""
        self.sizes.append(len(states))
        found = []
        logits = self.model(torch.tensor([[one.next] for one in states]), states)
        for state, following in zip(states, logits.argmax(1).tolist(), strict=True):
            state.written += 1
            is_last = state.next == END or state.written >= state.length
            found.append(([state.next], is_last))
            state.next = following
        self._count()
        return found

    def leave(self, state: Written) -> None:
        """Forget a cache."""
        self.inside.remove(state)
        if not self.inside:
            self.is_empty.set()

    def _count(self) -> None:
        held = sum(one.tokens for one in self.inside)
        self.tokens_max = max(self.tokens_max, held)

    def alone(self, prompt: Prompt) -> list[int]:
        """Return what it writes if nothing else is there."""
        (state,) = self.enter([prompt])
        assert isinstance(state, Written)
        tokens: list[int] = []
        while True:
            ((new, is_last),) = self.step([state])
            tokens += new
            if is_last:
                self.leave(state)
                return tokens


def memory_of(prompt: Prompt) -> int:
    """Return how many tokens a cache has at most."""
    return len(prompt.tokens) + prompt.length


def prompts(count: int, seed: int) -> list[Prompt]:
    """Return prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=generator))

    return [
        Prompt(
            tuple(number(1, VOCABULARY - 1) for _ in range(number(1, 12))),
            number(1, 24),
        )
        for _ in range(count)
    ]


# What runs on the worker that has the model, by test: workers share its process.
batchers: dict[str, ContinuousBatcher[Prompt, Written, int]] = {}


@expose
async def generate(name: str, tokens: Any, length: int) -> AsyncGenerator[int, None]:
    """Stream the tokens that follow a prompt."""
    asked = batchers[name].generate(Prompt(tuple(tokens), length))
    async with aclosing(asked) as written:
        async for token in written:
            yield token
