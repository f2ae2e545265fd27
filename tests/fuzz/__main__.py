"""Fuzz a decoder, guided by coverage.

    $ python -m tests.fuzz frames --executions 1000000
    $ python -m tests.fuzz messages --minutes 10
    $ python -m tests.fuzz messages --replay .fuzz/found-messages-crash-1234
    $ python -m tests.fuzz frames --minimize

Begins with the corpus and the seeds, keeps what it finds in `--work`, and stops at the
first input that breaks an invariant.  `--replay` shows what an input does.
`--minimize` instead replaces the corpus by those of the inputs found so far that reach
something no shorter one does.  Only fuzzing needs `atheris`.
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

from tests.fuzz.replaying import CORPUS, TARGETS

# A decode of a KiB takes a millisecond, but a machine may stand still; and no decoder
# has a use for so much memory.
TIMEOUT_S = 120
MEMORY_MIB = 2048
# What is instrumented, so that its coverage guides.
DECODERS = ("asyncrpc.core.wire", "asyncrpc.core.serde")
GO_THROUGH = {
    "http": ("asyncrpc.serving", "asyncrpc.tools"),
    "messages": (
        *("asyncrpc.core", "asyncrpc.parallel", "asyncrpc.tools.inspection"),
        "asyncrpc.serving",
    ),
    "sidecar": ("asyncrpc.core.sidecar",),
}


def save(data: bytes, folder: Path) -> None:
    name = hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]
    (folder / name).write_bytes(data)


def fuzz(name: str, limits: Sequence[str], work: Path, corpus: Path) -> None:
    import atheris  # noqa: PLC0415  (nobody else needs it)

    parts = GO_THROUGH.get(name, DECODERS)
    with atheris.instrument_imports(include=list(parts)):
        target = importlib.import_module(f"tests.fuzz.fuzz_{name}")
    for seed in target.seeds():
        save(seed, work)
    flags = [
        *(*limits, "-max_len=512", f"-timeout={TIMEOUT_S}"),
        *(f"-rss_limit_mb={MEMORY_MIB}", "-print_final_stats=1"),
        f"-artifact_prefix={work.parent}/found-{name}-",
        *(str(work), str(corpus)),
    ]
    with setting_of(target):
        atheris.Setup([sys.argv[0], *flags], target.check)
        atheris.Fuzz()


def minimize(name: str, work: Path, corpus: Path) -> None:
    """Replace the corpus by what is needed of it, and of what was found."""
    from tests.fuzz.minimizing import minimized  # noqa: PLC0415  (imports asyncrpc)

    target = importlib.import_module(f"tests.fuzz.fuzz_{name}")
    old = [path for folder in (work, corpus) for path in folder.iterdir()]
    crashes = work.parent.glob(f"found-{name}-*")
    inputs = [path.read_bytes() for path in (*old, *crashes)]
    with setting_of(target):
        kept = minimized(target.check, (*inputs, *target.seeds()))
    for path in corpus.iterdir():
        path.unlink()
    for data in kept:
        save(data, corpus)
    print(f"{name}: {len(kept)} of {len(inputs)} inputs")  # noqa: T201  (a command prints)


def setting_of(target: ModuleType) -> nullcontext[None]:
    setting: nullcontext[None] = getattr(target, "setting", nullcontext)()
    return setting


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.fuzz")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--executions", type=int, default=0, help="0: no limit")
    parser.add_argument("--minutes", type=float, default=0.0, help="0: no limit")
    parser.add_argument("--work", type=Path, default=Path(".fuzz"))
    parser.add_argument("--minimize", action="store_true")
    parser.add_argument("--replay", type=Path, help="one input, without atheris")
    options = parser.parse_args()
    work, corpus = options.work / options.target, CORPUS / options.target
    for folder in (work, corpus):
        folder.mkdir(parents=True, exist_ok=True)
    if options.replay is not None:
        target = importlib.import_module(f"tests.fuzz.fuzz_{options.target}")
        with setting_of(target):
            target.check(options.replay.read_bytes())
    elif options.minimize:
        minimize(options.target, work, corpus)
    else:
        limits = [f"-max_total_time={round(60 * options.minutes)}"]
        limits.append(f"-runs={options.executions or -1}")
        fuzz(options.target, limits, work, corpus)


if __name__ == "__main__":
    main()
