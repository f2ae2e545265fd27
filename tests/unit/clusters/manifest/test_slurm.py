"""What the batch script says; the tests of clusters give it to the real sbatch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from asyncrpc.tools.cli.main import main

STATE = "$state =~ JobState=RUNNING|Reason=TimeLimit"
PROGRAM = ("python", "train.py", "--name", "a b", "$HOME")


def written(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["manifest", "slurm", *options, *PROGRAM]) == 0
    return capsys.readouterr().out


def directives(script: str) -> list[str]:
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    lines_found = [
        line.removeprefix("#SBATCH ") for line in lines if line[:7] == "#SBATCH"
    ]
    assert lines[1 : len(lines_found) + 1] == [
        f"#SBATCH {directive}" for directive in lines_found
    ]
    return lines_found


def test_minimal_batch_script_has_the_default_directives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = written(capsys)
    assert directives(script) == [
        "--nodes=1",
        "--ntasks-per-node=1",
        "--no-requeue",
        "--output=%x-%j.out",
    ]
    assert "\nsrun python train.py --name 'a b' '$HOME'\n" in script
    assert "scontrol" not in script


def test_full_batch_script_has_every_directive(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = written(
        capsys,
        *("--nodes", "2", "--tasks-per-node", "4", "--cpus-per-task", "8"),
        *("--gpus-per-node", "4", "--time", "1-12:00:00", "--grace", "120"),
        *("--requeue", "--survive", "--job-name", "my job", "--partition", "gpu"),
        *("--account", "me", "--output", "out/%j", "--module", "gcc/12"),
        *("--module", "cuda", "--venv", "/opt/my env/", "--interface", "ib0"),
        *("--secret-file", "/home/me/secret"),
    )
    assert directives(script) == [
        *("--job-name='my job'", "--nodes=2", "--ntasks-per-node=4"),
        *("--cpus-per-task=8", "--gpus-per-node=4", "--partition=gpu", "--account=me"),
        *("--time=1-12:00:00", "--signal=TERM@120", "--requeue", "--open-mode=append"),
        *("--no-kill", "--output=out/%j"),
    ]
    body = script.splitlines()
    for line in (
        "module load gcc/12",
        "module load cuda",
        "source '/opt/my env/bin/activate'",
        "export ASYNCRPC_INTERFACE=ib0",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
        "export ASYNCRPC_SECRET_FILE=/home/me/secret",
        "srun --no-kill python train.py --name 'a b' '$HOME'",
        f'if [ "$code" -eq 75 ] && [[ {STATE} ]]; then',
        '    scontrol requeue "$SLURM_JOB_ID" && sleep 600  # which the requeue ends',
    ):
        assert line in body
    assert "urandom" not in script


@pytest.mark.parametrize("options", [(), ("--requeue", "--module", "it's")], ids=str)
def test_bash_parses_the_batch_script(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "job.sbatch"
    assert main(["manifest", "slurm", "--file", str(path), *options, *PROGRAM]) == 0
    assert capsys.readouterr().out == ""
    checked = subprocess.run(
        ["/bin/bash", "-n", str(path)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--nodes", "0"), "--nodes must be at least 1"),
        (("--tasks-per-node", "-1"), "--tasks-per-node"),
        (("--cpus-per-task", "0"), "--cpus-per-task"),
        (("--gpus-per-node", "0"), "--gpus-per-node"),
        (("--time", "soon"), "--time must be minutes"),
        (("--time", "1:2:3:4"), "--time"),
        (("--grace", "60"), "give --time as well"),
        (("--time", "60", "--grace", "0"), "--grace must be 1 to 65535"),
        (("--job-name", "a\n#SBATCH --uid=0"), "--job-name must be one printable line"),
    ],
)
def test_wrong_option_is_named(
    options: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifest", "slurm", *options, *PROGRAM]) == 2
    assert problem in capsys.readouterr().err
