"""Fuzz a decoder, guided by coverage.

    $ python -m tests.fuzz frames --executions 1000000

Begins with the corpus and the seeds, keeps what it finds in `--work`, and stops at the
first input that breaks an invariant.  `--minimize` instead replaces the corpus by the
smallest set of inputs found so far that reaches as much.  Needs `atheris`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import atheris

from tests.fuzz.replaying import CORPUS, TARGETS

# A decode of a KiB takes a millisecond, but a machine may stand still; and no decoder
# has a use for so much memory.
TIMEOUT_S = 120
MEMORY_MIB = 2048


def load(name: str) -> ModuleType:
    """Import a target, with what it tests instrumented."""
    with atheris.instrument_imports(
        include=["asyncrpc.wire", "asyncrpc.serde", "asyncrpc.transport.address"]
    ):
        return importlib.import_module(f"tests.fuzz.fuzz_{name}")


def plant(target: ModuleType, work: Path) -> None:
    """Write the seeds where the fuzzer looks."""
    work.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (work / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)


def flags_for(given: argparse.Namespace, work: Path, corpus: Path) -> Sequence[str]:
    limits = [f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={MEMORY_MIB}", "-max_len=512"]
    if given.minimize:
        for old in corpus.glob("*"):
            old.unlink()
        return [*limits, "-merge=1", str(corpus), str(work)]
    found = f"-artifact_prefix={work.parent}/found-{given.target}-"
    runs = f"-runs={given.executions}"
    return [*limits, runs, "-print_final_stats=1", found, str(work), str(corpus)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.fuzz")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--work", type=Path, default=Path(".fuzz"))
    parser.add_argument("--minimize", action="store_true")
    given = parser.parse_args()
    target = load(given.target)
    work, corpus = given.work / given.target, CORPUS / given.target
    corpus.mkdir(parents=True, exist_ok=True)
    plant(target, work)
    setting = getattr(target, "setting", nullcontext)
    with setting():
        flags = flags_for(given, work, corpus)
        atheris.Setup([sys.argv[0], *flags], target.check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
