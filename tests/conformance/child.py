"""One test, in the process that was forked for it.

The process is a session of its own, so that all its ranks can be ended at once.  What
it and they print goes to a file.  How it ended goes to another, whole or not at all.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import tempfile
import time
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tests.conformance.placeholders import LEAKED, MISSING, read_marks
from tests.conformance.results import Result, Status, shortened

LOG: Final = "log.txt"  # in the test's folder
RESULT: Final = "result.json"
MESSAGE_CHARACTERS_MAX: Final = 500
DETAIL_CHARACTERS_MAX: Final = 6000

HINT = re.compile(r"(?:\\n|\n)+To execute this test, run the following")
RANK = re.compile(
    r"^(?:RuntimeError: )?Process \d+ exited with error code \d+ and exception:$",
    re.MULTILINE,
)
CHAINED = re.compile(
    r"^(?:During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:)$",
    re.MULTILINE,
)
TRACEBACK: Final = "Traceback (most recent call last):"
CPP_STACK: Final = ("Exception raised from", "frame #")


def run(name: str, folder: Path) -> None:
    """Run one test, and leave its result in its folder."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what the runner does is not for us
    os.setsid()
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TMPDIR"] = os.environ[_suites().MARKS] = tempfile.tempdir = str(folder)
    begun_s = time.monotonic()
    try:
        result = _result(name)
    except Exception as error:  # noqa: BLE001  (whatever it is, it fails this test)
        result = Result(Status.FAIL, f"not run: {type(error).__name__}: {error}")
    result = replace(
        _with_marks(result, folder), seconds=round(time.monotonic() - begun_s, 2)
    )
    part = folder / f"{RESULT}.part"
    part.write_text(json.dumps(shortened(result)), "utf-8")
    part.replace(folder / RESULT)


def _suites() -> Any:
    """Import the module that has the test cases, which imports torch: late."""
    name = os.environ.get("CONFORMANCE_SUITES", "tests.conformance.suites")
    return importlib.import_module(name)


def _result(name: str) -> Result:
    test, result = _suites().case(name), unittest.TestResult()
    test.run(result)
    exit_codes: tuple[int | None, ...] = getattr(test, "exit_codes", ())
    if failures := result.errors + result.failures:
        text = failures[0][1]
        late = "terminated or timed out after" in text
        return Result(
            Status.TIMEOUT if late else Status.FAIL,
            last_line(text),
            exit_codes=exit_codes,
            detail=text[-DETAIL_CHARACTERS_MAX:],
        )
    if result.skipped:
        return Result(Status.SKIP, result.skipped[0][1])
    message = ""
    if any(exit_codes):
        message = f"passes by PyTorch's rule, but exit codes {exit_codes}"
    return Result(Status.PASS, message, exit_codes=exit_codes)


def _with_marks(result: Result, folder: Path) -> Result:
    """Fail a test for what any rank noticed, though an exception was swallowed."""
    for kind, says in ((LEAKED, "reached torch's own RPC"), (MISSING, "not provided")):
        if names := read_marks(folder, kind):
            message = f"{says}: {', '.join(names)} | {result.message}"
            result = replace(
                result,
                status=Status.FAIL,
                message=message[:MESSAGE_CHARACTERS_MAX],
                missing=names if kind == MISSING else result.missing,
                leaked=names if kind == LEAKED else result.leaked,
            )
    return result


def last_line(text: str) -> str:
    """Return the exception's line of what unittest says, of the first rank that failed.

    Its message may go on for a line or two; the C++ stack that torch adds is left out.
    """
    text = HINT.split(text)[0]
    ranks = RANK.split(text)
    block = ranks[1] if len(ranks) > 1 else text
    # The last of a chain; tracebacks of callees are part of messages, and come later.
    block = CHAINED.split(block)[-1]
    lines = block[max(0, block.find(TRACEBACK)) :].splitlines()
    if lines and lines[0].startswith(TRACEBACK):
        lines = lines[1:]
    for at, line in enumerate(lines):
        if line and not line[0].isspace():
            said = [line.strip()]
            for more in lines[at + 1 : at + 4]:
                if more.startswith(CPP_STACK):
                    break
                said.append(more.strip())
            return " ".join(said).strip()[:MESSAGE_CHARACTERS_MAX]
    return (lines[-1] if lines else text)[:MESSAGE_CHARACTERS_MAX]
