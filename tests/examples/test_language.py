"""A language model learns what holds in unseen text; its server streams, and ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Final
from urllib.request import urlopen

import pytest

from tests.commands import REPOSITORY
from tests.examples.programs import PROGRAM_S, rows, run


@pytest.mark.slow
def test_perplexity_falls_on_unseen_text() -> None:
    printed = run("language_model.py", "--write", "80", "--start", "The Mouse ")
    known = re.search(r"by frequency alone, perplexity ([\d.]+)", printed)
    assert known is not None
    table = rows(printed)
    assert [row[0] for row in table] == [str(epoch) for epoch in range(1, 7)]
    training, held_out = ([float(row[column]) for row in table] for column in (1, 2))
    assert training == sorted(training, reverse=True)
    assert held_out[-1] < 0.5 * float(known[1])
    assert held_out[-1] < 0.75 * held_out[0]
    assert "100%" not in {row[3] for row in table}  # some are short enough
    written = printed[printed.rindex("╯" if "╯" in printed else "┘") + 1 :].strip("\n")
    assert written.startswith("The Mouse ")
    assert len(written) >= len("The Mouse ") + 80 - 10  # ends may be spaces and lines


@pytest.mark.slow
def test_gradients_are_clipped_by_the_norm_over_both_workers() -> None:
    """Adam adds 1e-8 to its divisor: gradients far shorter teach nobody anything."""
    table = rows(run("language_model.py", "--quick", "--write", "0", "--clip", "1e-10"))
    assert {row[3] for row in table} == {"100%"}
    assert float(table[-1][2]) > 40.0


QUERY: Final = "write?prompt=Alice&length=20&boldness=0.5"


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "examples.language_server", "--port", "0"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def url_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    served = (line.partition("serving ")[2].strip() for line in server.stdout)
    url = next(filter(None, served), "")
    assert url, "the program has ended"
    return url


@pytest.mark.slow
def test_server_streams_a_text_and_ends_in_order(server: subprocess.Popen[str]) -> None:
    url = f"{url_of(server)}/{QUERY}"
    with urlopen(url, timeout=PROGRAM_S) as response:  # noqa: S310
        events = response.read().decode().strip().split("\n\n")
    place, *pieces, end = events
    assert place.startswith('event: place\ndata: {"replica":"model-')
    assert end.startswith("event: end")
    texts = [json.loads(piece.removeprefix("data: ")) for piece in pieces]
    assert len("".join(text["text"] for text in texts)) == 20
    server.send_signal(signal.SIGTERM)
    assert server.wait(PROGRAM_S) == 0


@pytest.mark.slow
def test_processes_end_when_the_front_is_killed(server: subprocess.Popen[str]) -> None:
    assert url_of(server)
    server.kill()
    assert server.stdout is not None
    server.stdout.read()  # to its end: the others hold it, too
