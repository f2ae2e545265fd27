"""An sshd of this session on loopback; nothing of a test is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster_grounds import SSHD
from tests.clusters.ssh.sshd import Sshd, missing_programs
from tests.ports import free_port


@pytest.fixture(scope="session")
def shared_sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """Run the sshd of this session; skip where there can be none."""
    pytest.importorskip("asyncssh", reason="needs asyncssh: the extra ssh")
    if missing := missing_programs():
        pytest.skip(f"needs {', '.join(missing)}: tests/clusters/install.sh")
    top = tmp_path_factory.mktemp("sshd")
    with Sshd(top, "127.0.0.1", free_port()) as running:
        yield running


@pytest.fixture
def sshd(shared_sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    """Return the sshd; the ground `ssh` finds it."""
    told = {
        "host": shared_sshd.host,
        "key": str(shared_sshd.key),
        "known_hosts": str(shared_sshd.known_hosts),
    }
    monkeypatch.setenv(SSHD, json.dumps(told))
    return shared_sshd
