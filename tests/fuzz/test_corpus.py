"""Every input that fuzzing has kept holds: each reaches something no other does."""

from __future__ import annotations

import importlib
from contextlib import nullcontext

import pytest

from tests.fuzz.replaying import CORPUS, TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_of_each_decoder_holds(name: str) -> None:
    target = importlib.import_module(f"tests.fuzz.fuzz_{name}")
    kept = sorted((CORPUS / name).iterdir())
    assert kept
    with getattr(target, "setting", nullcontext)():
        for data in (*target.seeds(), *(path.read_bytes() for path in kept)):
            target.check(data)


def test_every_target_is_replayed() -> None:
    found = {path.stem.removeprefix("fuzz_") for path in CORPUS.parent.glob("fuzz_*")}
    assert found == set(TARGETS)
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
