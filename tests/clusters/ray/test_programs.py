"""Programs on the cluster: the example, and those of docs/how-to/run-on-ray.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]")

from tests.clusters.hanging import HANGS_S
from tests.clusters.ray.conftest import ROOT, Session
from tests.commands import printed_by

PAGE = ROOT / "docs" / "how-to" / "run-on-ray.md"
PROGRAM = re.compile(r"^```python no-run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Ray reports a lost worker or node, in lines that may come amid those of the program.
RAYS_REPORT = re.compile(r"\x1b\[\d+m\(raylet\).*\n(\t\(\d\).*\n)*")


def run(session: Session, cwd: Path, *command: str) -> str:
    """Run a program on the cluster; return what it prints."""
    # Its address is "auto", too.
    environ = {"RAY_ADDRESS": session.address, "RAY_LOG_TO_DRIVER": "0"}
    command = (sys.executable, *command)
    printed = printed_by(command, cwd=cwd, environ=environ, timeout_s=HANGS_S)
    return RAYS_REPORT.sub("", printed)


def test_example_learns_despite_a_killed_trainer(
    session: Session, tmp_path: Path
) -> None:
    example = str(ROOT / "examples" / "train_on_ray.py")
    options = ("--address", session.address, "--kill-in", "2")
    output = run(session, tmp_path, example, *options)
    assert output.count("loss ") == 3
    assert "round 2 is lost: " in output
    accuracy = re.search(r"digits: ([\d.]+)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) >= 85.0


@pytest.mark.parametrize("number", range(len(PROGRAM.findall(PAGE.read_text("utf-8")))))
def test_program_of_the_page_prints_the_shown_output(
    session: Session, tmp_path: Path, number: int
) -> None:
    page = PAGE.read_text("utf-8")
    program = list(PROGRAM.finditer(page))[number]
    (tmp_path / "program.py").write_text(program[1])
    output = run(session, tmp_path, "program.py")
    said = PRINTED.match(page, program.end() + 1)
    assert said is not None, "the page must say what the program prints"
    assert output == said[1]
