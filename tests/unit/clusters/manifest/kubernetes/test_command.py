"""`asyncrpc manifest k8s`: from arguments to text that kubectl reads."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from asyncrpc.clusters.manifest.kubernetes.command import default_format
from asyncrpc.clusters.manifest.kubernetes.kinds import KINDS
from asyncrpc.tools.cli.main import main
from tests.unit.clusters.manifest.kubernetes.workloads import full, small

SMALL = [
    *("manifest", "k8s", "--image", "registry.example/trainer:1", "--workers", "4"),
    *("trainer", "--", "python", "train.py"),
]
FULL = [
    *("manifest", "k8s", "--image", "registry.example/trainer:1", "--workers", "4"),
    *("--namespace", "research", "--secret", "shared-secret", "--cpu", "4"),
    *("--memory", "16Gi", "--shm", "2Gi", "--gpus", "2", "--probe", "http:8080"),
    *("--grace", "60", "--pre-stop", "5", "--restarts", "2", "--user", "1000"),
    *("--env", "LEARNING_RATE=0.1", "--env", "PATTERN=$(HOME)"),
    *("trainer", "--", "python", "train.py"),
]


def test_printed_text_is_output_of_builders(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == KINDS["job"](small())
    assert main(FULL) == 0
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == KINDS["job"](full())


def test_json_output_is_one_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL[:2], "--format", "json", *SMALL[2:]]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["kind"], output["apiVersion"]) == ("List", "v1")
    assert output["items"] == KINDS["job"](small())


def test_default_format_without_pyyaml_is_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert default_format() == "json"
    assert main(SMALL) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "List"
    assert main([*SMALL[:2], "--format", "yaml", *SMALL[2:]]) == 2
    assert "pip install 'asyncrpc-torch[manifest]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--workers", "0"], "asyncrpc manifest: --workers must be at least 1"),
        (["--env", "A"], "--env must be NAME=VALUE, not 'A'"),
        (["--probe", "https:1"], "--probe must be http:PORT"),
        (["--memory", "lots"], "--memory must be a quantity"),
    ],
)
def test_wrong_option_is_named(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    at = SMALL.index("trainer")
    assert main([*SMALL[:at], *more, *SMALL[at:]]) == 2
    assert words in capsys.readouterr().err


def test_missing_program_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(SMALL[: SMALL.index("--")])
    assert "PROGRAM" in capsys.readouterr().err
