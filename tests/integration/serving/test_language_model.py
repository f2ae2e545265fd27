"""A language model with a cache: what it writes together is what it writes alone."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from asyncrpc import RejectedError, UsageError, current_worker
from asyncrpc.serving import ContinuousBatcher
from tests.integration.serving import language
from tests.integration.serving.conftest import Group
from tests.integration.serving.language import Decoder, Prompt, memory_of, prompts


async def written(
    batcher: ContinuousBatcher[Prompt, language.Written, int],
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
    language.batchers[group.name] = batcher

    async def stream(prompt: Prompt, take: int = 1000) -> list[int]:
        tokens: list[int] = []
        peer = current_worker().peer("back")
        asked = peer.stream(
            language.generate, group.name, list(prompt.tokens), prompt.length
        )
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
        del language.batchers[group.name]
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
