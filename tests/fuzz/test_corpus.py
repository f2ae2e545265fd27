"""Every input that fuzzing has kept holds: each reaches something no other does."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import partial

import pytest

from tests.fuzz.minimizing import arcs_of, minimized
from tests.fuzz.replaying import CORPUS, TARGETS


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of layouts in beta
@pytest.mark.parametrize("name", TARGETS)
def test_corpus_of_each_decoder_holds(name: str) -> None:
    target = importlib.import_module(f"tests.fuzz.fuzz_{name}")
    kept = sorted((CORPUS / name).iterdir())
    assert kept
    with getattr(target, "setting", nullcontext)():
        for data in (*target.seeds(), *(path.read_bytes() for path in kept)):
            target.check(data)


def test_every_target_is_replayed() -> None:
    targets = {path.stem.removeprefix("fuzz_") for path in CORPUS.parent.glob("fuzz_*")}
    assert targets == set(TARGETS)
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)


def test_minimized_corpus_reaches_every_arc() -> None:
    target = importlib.import_module("tests.fuzz.fuzz_hello")
    inputs = [*target.seeds(), b"", b"\0\xc1", b"\0\xc1 more"]
    kept = minimized(target.check, inputs)
    assert len(kept) < len(inputs)

    def reached(these: list[bytes]) -> set[object]:
        return {
            arc
            for input_bytes in these
            for arc in arcs_of(partial(target.check, input_bytes))
        }

    assert reached(kept) == reached(inputs)
    assert reached(kept[:-1]) < reached(inputs)
