"""The language server without a browser: it comes up, streams, and ends by SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Final
from urllib.request import urlopen

import pytest

from tests.examples.programs import PROGRAM_S, REPOSITORY

QUERY: Final = "write?prompt=Alice&length=20&boldness=0.5"


@pytest.mark.slow
def test_server_streams_a_text_and_ends_in_order() -> None:
    command = [sys.executable, "-m", "examples.language_server", "--port", "0"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = ""
            while not url:
                line = process.stdout.readline()
                assert line, "the program has ended"
                url = line.partition("serving ")[2].strip()
            with urlopen(f"{url}/{QUERY}", timeout=PROGRAM_S) as response:  # noqa: S310
                events = response.read().decode().strip().split("\n\n")
            place, *pieces, end = events
            assert place.startswith('event: place\ndata: {"replica":"model-')
            assert end.startswith("event: end")
            texts = [json.loads(piece.removeprefix("data: ")) for piece in pieces]
            assert len("".join(text["text"] for text in texts)) == 20
            process.send_signal(signal.SIGTERM)
            assert process.wait(PROGRAM_S) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_processes_end_when_the_front_is_killed() -> None:
    command = [sys.executable, "-m", "examples.language_server", "--port", "0"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert any("serving " in line for line in process.stdout)
            process.kill()
            process.stdout.read()  # to its end: the others hold it, too
        finally:
            process.kill()
