"""Lists of hosts are expanded as Slurm's own program expands them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from asyncrpc.core.environment.slurm import expand_hosts
from tests.property.host_lists import host_lists

# scontrol asks no daemon for this, but wants a configuration.
CONFIGURATION = """\
ClusterName=lists
SlurmctldHost=localhost
NodeName=a
PartitionName=p Nodes=a
"""


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("scontrol") is None:
        pytest.skip("needs scontrol: tests/clusters/install.sh")
    written = tmp_path_factory.mktemp("lists") / "slurm.conf"
    written.write_text(CONFIGURATION)
    return written


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(host_list=host_lists(has_suffixes=False))
def test_host_list_is_expanded_as_by_scontrol(
    configuration: Path, host_list: tuple[str, list[str]]
) -> None:
    text, _ = host_list
    done = subprocess.run(
        [str(shutil.which("scontrol")), "show", "hostnames", text],
        env={**os.environ, "SLURM_CONF": str(configuration)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expand_hosts(text) == done.stdout.split()
