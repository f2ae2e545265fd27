"""A language model with a cache: what it writes together is what it writes alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from asyncrpc import RejectedError, UsageError, current_worker, expose
from asyncrpc.serving import ContinuousBatcher
from tests.integration.serving.conftest import Group

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
        projected: torch.Tensor = self.project(self.first(hidden))
        return projected.chunk(3, dim=-1)

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
        at = torch.stack([torch.arange(start, start + new) for start in begun])
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
        q, k, v = (tensor.view(new, HEADS, -1) for tensor in (q, k, v))
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
        results: list[Written | Exception] = []
        for prompt in prompts:
            if not prompt.tokens:
                results.append(ValueError("a prompt has at least one token"))
                continue
            state = Written(prompt.length)
            logits = self.model(torch.tensor([prompt.tokens]), [state])
            state.next = int(logits[0].argmax())
            self.inside.add(state)
            self.is_empty.clear()
            results.append(state)
        self._count()
        return results

    @torch.inference_mode()
    def step(self, states: list[Written]) -> list[tuple[list[int], bool]]:
        """Write a token of each, and find the next one."""
        self.sizes.append(len(states))
        results = []
        logits = self.model(torch.tensor([[state.next] for state in states]), states)
        for state, following in zip(states, logits.argmax(1).tolist(), strict=True):
            state.written += 1
            is_last = state.next == END or state.written >= state.length
            results.append(([state.next], is_last))
            state.next = following
        self._count()
        return results

    def leave(self, state: Written) -> None:
        """Forget a cache."""
        self.inside.remove(state)
        if not self.inside:
            self.is_empty.set()

    def _count(self) -> None:
        held = sum(state.tokens for state in self.inside)
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


async def written(
    batcher: ContinuousBatcher[Prompt, Written, int],
    prompt: Prompt,
    *,
    take: int = 1000,
) -> list[int]:
    tokens = []
    async with aclosing(batcher.generate(prompt)) as stream:
        async for token in stream:
            tokens.append(token)
            if len(tokens) == take:
                break
    return tokens


@pytest.mark.parametrize("slots", [1, 3, 6])
async def test_batched_tokens_equal_those_written_alone(slots: int) -> None:
    """Whichever texts enter and leave beside it, in whichever step."""
    decoder, alone = Decoder(), Decoder()
    asked = prompts(12, seed=slots)
    expected = [alone.alone(prompt) for prompt in asked]
    assert len({len(sequence) for sequence in expected}) > 5, (
        "they end at different steps"
    )
    batcher = ContinuousBatcher(
        decoder, slots, memory_max=160, memory_of=memory_of, items_max=4
    )
    async with batcher:
        texts = await asyncio.gather(
            *(written(batcher, sequence) for sequence in asked)
        )
    stats = batcher.stats()
    assert texts == expected
    assert max(decoder.sizes) == slots
    assert decoder.tokens_max <= 160
    assert decoder.inside == set()
    assert (stats.requests.answered, stats.memory_held) == (12, 0)
    assert stats.items == sum(map(len, expected))


async def test_consumers_that_leave_or_fail_do_not_affect_the_others() -> None:
    decoder, alone = Decoder(), Decoder()
    asked = prompts(12, seed=5)
    expected = [alone.alone(prompt) for prompt in asked]
    batcher = ContinuousBatcher(decoder, 4, memory_max=150, memory_of=memory_of)
    async with batcher:
        texts = await asyncio.gather(
            *(
                written(batcher, prompt, take=2 if index % 3 == 0 else 1000)
                for index, prompt in enumerate(asked)
            ),
            written(batcher, Prompt((), 3)),
            written(batcher, Prompt((1,) * 100, 51)),
            return_exceptions=True,
        )
        stats = batcher.stats()
    *texts, empty, large = texts
    assert isinstance(empty, ValueError)
    assert isinstance(large, UsageError)
    assert "takes up to 151 of memory never fits" in str(large)
    for index, (tokens, right) in enumerate(zip(texts, expected, strict=True)):
        assert tokens == (right[:2] if index % 3 == 0 else right)
    assert decoder.inside == set()
    assert stats.requests.failed == 1


async def test_text_streams_from_the_worker_of_the_model(group: Group) -> None:
    """A consumer on another worker that leaves frees the memory there."""
    decoder, alone = Decoder(), Decoder()
    asked = prompts(6, seed=9)
    expected = [alone.alone(prompt) for prompt in asked]
    endless = Prompt((3, 1, 4), 200)
    batcher = ContinuousBatcher(
        decoder, 3, memory_max=500, memory_of=memory_of, items_max=2
    )
    batchers[group.name] = batcher

    async def stream(prompt: Prompt, take: int = 1000) -> list[int]:
        tokens: list[int] = []
        peer = current_worker().peer("back")
        asked = peer.stream(generate, group.name, list(prompt.tokens), prompt.length)
        async with aclosing(asked) as items:
            async for token in items:
                tokens.append(token)
                if len(tokens) == take:
                    break
        return tokens

    try:
        async with batcher, group.front():
            texts = await asyncio.gather(
                *map(stream, asked), stream(endless, 3), return_exceptions=True
            )
            async with asyncio.timeout(30):
                await decoder.is_empty.wait()
    finally:
        del batchers[group.name]
    assert texts[:-1] == expected
    assert texts[-1] == alone.alone(endless)[:3]


async def test_leaving_the_block_waits_for_texts_in_progress() -> None:
    decoder, alone = Decoder(), Decoder()
    asked = prompts(5, seed=2)
    async with ContinuousBatcher(decoder, 2) as batcher:
        tasks = [asyncio.ensure_future(written(batcher, prompt)) for prompt in asked]
        await asyncio.sleep(0)
    assert [await task for task in tasks] == [alone.alone(prompt) for prompt in asked]
    with pytest.raises(RejectedError, match="closed"):
        await written(batcher, asked[0])
    assert decoder.inside == set()
