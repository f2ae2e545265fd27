"""The doctor shows what is found, and says what is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from asyncrpc.tools.cli.doctor.placement import HostFacts, as_record, as_text, diagnose
from asyncrpc.tools.cli.main import main
from tests.unit.core.environment import captured

WELL = HostFacts(
    has_secret=True,
    addresses=("10.0.0.2", "127.0.0.1"),
)

TABLE = """\
started by Slurm

what              value  from                                              launcher
rank              2      SLURM_PROCID=2                                    Slurm
world_size        4      SLURM_STEP_NUM_TASKS=4                            Slurm
local_rank        2      SLURM_LOCALID=2                                   Slurm
local_world_size  3      SLURM_STEP_TASKS_PER_NODE=3,1                     Slurm
node              0      SLURM_NODEID=0                                    Slurm
nodes             2      SLURM_STEP_NUM_NODES=2                            Slurm
host              node1  derived from SLURM_STEP_NODELIST=node[1-2]        Slurm
port              15160  derived from SLURM_JOB_ID=10 and SLURM_STEP_ID=0  Slurm
run_id            10.0   SLURM_JOB_ID=10 and SLURM_STEP_ID=0               Slurm
name              worker2  derived from SLURM_PROCID=2                       Slurm

a worker can start here by env://"""


def test_table_shows_every_value_with_its_origin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = as_text(diagnose(captured.SLURM_STEP, WELL)).splitlines()
    table = lines[2:13]
    for column in ("value", "from", "launcher"):
        at = table[0].index(column)
        assert all(row[at - 1] == " " and row[at] != " " for row in table)
    words = [" ".join(row.split()) for row in lines]
    assert words == [" ".join(row.split()) for row in TABLE.splitlines()]


def test_long_value_is_wrapped_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = {**captured.SLURM_STEP, "ASYNCRPC_RUN_ID": "Q" * 120}
    text = as_text(diagnose(long, WELL))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("Q") == 240
    assert "…" not in text


def test_surrounding_launchers_are_named() -> None:
    text = as_text(diagnose({**captured.SLURM_STEP, **captured.TORCHRUN}, WELL))
    assert text.splitlines()[0] == "started by torchrun, inside Slurm"


def test_json_output_is_readable_by_programs() -> None:
    record = as_record(diagnose(captured.OPEN_MPI, WELL))
    assert record["launcher"] == "Open MPI"
    assert record["problems"] == record["warnings"] == ()
    assert record["values"][0] == {
        "field": "rank",
        "value": 1,
        "origin": "OMPI_COMM_WORLD_RANK=1",
        "launcher": "Open MPI",
        "derived": False,
    }


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, r"RANK.*WORLD_SIZE.*MASTER_ADDR.*MASTER_PORT.*torchrun.*srun"),
        (captured.SLURM_BATCH, "its rank .*by srun"),
        ({**captured.SLURM_STEP, "RANK": "0"}, "RANK=0 .* SLURM_PROCID=2"),
        ({**captured.SLURM_STEP, "SLURM_PROCID": "x"}, "SLURM_PROCID must be a number"),
        ({**captured.TORCHRUN, "RANK": "9"}, "rank 9 is not in a world of 2"),
    ],
)
def test_failing_start_is_a_problem(environ: Mapping[str, str], words: str) -> None:
    diagnosis = diagnose(environ, WELL)
    assert len(diagnosis.problems) == 1
    _matches(diagnosis.problems[0], words)
    assert "a worker can start" not in as_text(diagnosis)


def test_contradictions_are_shown_with_every_value() -> None:
    text = as_text(diagnose({**captured.SLURM_STEP, "RANK": "0"}, WELL))
    assert "RANK=0 " in text
    assert "SLURM_LOCALID=2" in text


def _matches(text: str, words: str) -> None:
    assert re.search(words, text), text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"has_secret": False}, "no secret: .*ASYNCRPC_SECRET"),
        ({"addresses": ("127.0.0.1", "::1")}, "no address but loopback"),
    ],
)
def test_later_risk_is_a_warning(changed: dict[str, object], words: str) -> None:
    facts = HostFacts(**{**_fields(WELL), **changed})  # type: ignore[arg-type]
    diagnosis = diagnose(captured.SLURM_STEP, facts)
    assert diagnosis.problems == ()
    (warning,) = diagnosis.warnings
    _matches(warning, words)


# What the script of a batch job has, outside of its tasks.
JOB_OF_SLURM = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_JOB_NODELIST")


def _fields(facts: HostFacts) -> dict[str, object]:
    return {name: getattr(facts, name) for name in HostFacts.__slots__}


@pytest.mark.parametrize("environ", [captured.OPEN_MPI, captured.MPICH])
def test_workers_of_a_single_host_need_no_secret_or_network(
    environ: Mapping[str, str],
) -> None:
    facts = HostFacts(has_secret=False, addresses=())
    assert diagnose(environ, facts, launcher_pid=1).warnings == ()


def test_variables_set_by_hand_are_not_a_launcher() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    first, *_ = as_text(diagnose(environ, WELL)).splitlines()
    assert first == "no launcher is known to have started this process"


def test_job_entered_without_its_launcher_is_named() -> None:
    environ = {name: captured.SLURM_STEP[name] for name in JOB_OF_SLURM}
    diagnosis = diagnose(environ, WELL)
    first, *_ = as_text(diagnosis).splitlines()
    assert first == (
        "no launcher is known to have started this process, though variables of Slurm"
        " are set"
    )
    (problem,) = diagnosis.problems
    assert problem == (
        "env:// does not find its rank (RANK) and the number of workers (WORLD_SIZE)"
        f" (this process runs in Slurm job {environ['SLURM_JOB_ID']}, but not in one of"
        " its tasks: start the program by srun)"
    )


def test_environment_options_are_checked() -> None:
    facts = HostFacts(**{**_fields(WELL), "trouble": "no interface 'ib9'"})  # type: ignore[arg-type]
    assert diagnose(captured.SLURM_STEP, facts).problems == ("no interface 'ib9'",)


def test_exit_code_tells_whether_a_worker_could_start(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name in (*captured.every_name(), "ASYNCRPC_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ASYNCRPC_RUN_DIR", str(tmp_path))
    assert main(["doctor"]) == 1
    assert "problem: env:// does not find" in capsys.readouterr().out
    for name, text in captured.TORCHRUN.items():
        monkeypatch.setenv(name, text)
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["launcher"] == "torchrun"
