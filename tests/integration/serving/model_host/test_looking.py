"""`asyncrpc runs` and the verbs that look find a model and its web workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrpc.tools.cli.main import main
from tests.integration.serving.model_host import models
from tests.integration.serving.model_host.web import WebWorker

NewWeb = Callable[[], WebWorker]
VerbRunner = Callable[..., tuple[int, str]]


@pytest.fixture
def run_verb(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> VerbRunner:
    """Runs a command here, and returns its status and what it prints."""
    monkeypatch.setenv("ASYNCRPC_RUN_DIR", str(folder / "runs"))
    for name in ("ASYNCRPC_ADDRESS", "ASYNCRPC_SECRET", "ASYNCRPC_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)

    def tell(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        status = main(arguments)
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return tell


def test_the_verbs_find_a_model_and_its_web_workers(
    folder: Path, new_web: NewWeb, run_verb: VerbRunner
) -> None:
    status, printed = run_verb("status")
    assert status != 0
    assert "no run of yours is under way" in printed
    webs = [new_web(), new_web()]
    for web in webs:
        web.enter(linger_s=0.0)
    pid = webs[0].do("call", ("pid",))

    status, printed = run_verb("runs", "--json")
    (model,) = json.loads(printed)["runs"]
    assert (status, model["pid"], model["nprocs"]) == (0, pid, 3)
    assert model["command"] == ["ModelHost", f"{models.__name__}:make_model"]
    pids = [pid, *(web.pid for web in webs)]
    assert model["workers"][0]["pid"] == pid
    assert sorted(worker["pid"] for worker in model["workers"]) == sorted(pids)

    for chosen in ((), ("--run", "model-"), ("--run", str(pid))):
        status, printed = run_verb("status", *chosen, "--json")
        workers = json.loads(printed)["workers"]
        assert status == 0
        assert sorted(worker["pid"] for worker in workers) == sorted(pids)
        assert {worker["state"] for worker in workers} == {"runs"}
    status, printed = run_verb("stacks")
    assert status == 0
    for web_pid in pids:
        assert f"process {web_pid}" in printed
    status, printed = run_verb("refs")
    assert status == 0
    for web in webs:
        assert f"web-{web.pid}-" in printed  # holds the model
    for verb in (("calls",), ("top", "--once"), ("doctor",)):
        status, printed = run_verb(*verb)
        assert status == 0, printed

    webs[0].kill()
    status, printed = run_verb("status", "--json")
    assert status == 0
    left = {load["pid"] for load in json.loads(printed)["workers"]}
    assert left == {pid, webs[1].pid}


def test_why_follows_a_request_into_the_model(
    folder: Path, new_web: NewWeb, run_verb: VerbRunner
) -> None:
    web = new_web()
    web.enter(linger_s=0.0)
    web.begin("call", ("wait_forever",))
    while not (folder / "waiting").exists():  # it tells nothing else
        pass
    status, printed = run_verb("why", "--after", "0")
    assert status == 1
    assert "`Model.wait_forever`" in printed
    assert "which waits for" in printed
    assert "attach" not in printed  # as long as there is a web worker
    status, printed = run_verb("why", "--after", "0", "--json")
    ways = [hang["path"] for hang in json.loads(printed)["hangs"]]
    assert any({"model"} < {step["worker"] for step in way} for way in ways)
    web.kill()
