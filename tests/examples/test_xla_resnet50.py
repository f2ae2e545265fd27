"""The ResNet50 benchmark measures both ways, and has the network's size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.programs import rows, run

PNG = b"\x89PNG\r\n"
SMALL = ("--image_size", "32", "--batch_size", "2")


@pytest.mark.slow
def test_benchmark_compares_native_step_and_ddp() -> None:
    options = ("--fake_data", "--ddp", "--steps", "2", "--log_steps", "1")
    printed = run("xla_resnet50.py", *options, *SMALL)
    assert "of 25,557,032 parameters" in printed
    table = rows(printed)
    assert [row[0] for row in table] == ["native step", "DDP"]
    said = re.search(r"behind by (-?[\d.]+)% \(mean\); torch_xla's .* 5\.39%", printed)
    assert said is not None


@pytest.mark.slow
def test_native_step_and_ddp_learn_the_same(tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    options = ("--ddp", "--num_epochs", "1", "--plot", str(picture))
    large = ("--image_size", "16", "--batch_size", "240")  # three steps
    ((epoch, native, ddp),) = rows(run("xla_resnet50.py", *options, *large))
    assert epoch == "1"
    assert float(native.rstrip("%")) == pytest.approx(float(ddp.rstrip("%")), abs=10.0)
    assert picture.read_bytes().startswith(PNG)
