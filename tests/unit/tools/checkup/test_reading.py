"""The facts of the real process and host."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import asyncrpc
from asyncrpc import NetworkOptions, Options
from asyncrpc.core.transport.tls import Tls
from asyncrpc.tools.checkup.machine.checks import check_all
from asyncrpc.tools.checkup.machine.facts import LibraryFacts, SharedMemoryFacts
from asyncrpc.tools.checkup.machine.findings import CheckState
from asyncrpc.tools.checkup.reading import (
    Circumstances,
    gather,
    libraries,
    secret_file,
    shared_memory,
    wall_clock,
)

PLAIN = Circumstances(Options(secret="x" * 32), is_one_host=True)


def test_facts_describe_this_process() -> None:
    facts = gather(PLAIN, {"OMP_NUM_THREADS": "3"})
    assert facts.versions.asyncrpc == asyncrpc.__version__
    assert facts.versions.python == platform.python_version()
    installed = {library.name: library.version for library in facts.versions.libraries}
    assert installed["torch"] == importlib.metadata.version("torch")
    assert facts.threads.torch_threads == torch.get_num_threads()
    assert facts.threads.omp == "3"
    assert facts.secrets.secret_bytes == 32
    assert facts.secrets.origin == "Options.secret"
    assert facts.files.files_max is None or facts.files.files_max > 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_facts_describe_this_host() -> None:
    facts = gather(PLAIN, {})
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert facts.memory.total is not None
    assert abs(facts.memory.total - pages) < pages / 10
    assert facts.files.opened
    assert facts.clocks.source or not Path("/sys/devices/system/clocksource").exists()
    for interface in facts.network.interfaces:
        assert interface.mtu is not None
        assert interface.addresses


def test_every_check_reports_on_the_real_host() -> None:
    findings = check_all(gather(PLAIN, {}))
    names = [finding.check for finding in findings]
    for name in (
        *("asyncrpc", "Python", "torch", "event loop", "threads", "time-outs"),
        *("memory", "memory limit", "open files", "huge pages"),
        *("monotonic clock", "wall clock", "interface", "secret", "debuggers"),
    ):
        assert name in names
    assert all(finding.found for finding in findings)
    wrong = [finding for finding in findings if finding.state is CheckState.WRONG]
    assert wrong == []  # or the tests could not run here


async def test_event_loop_of_a_worker_is_named() -> None:
    loop = type(asyncio.get_running_loop())
    circumstances = replace(PLAIN, loop=loop, is_debug=True)
    facts = await asyncio.to_thread(gather, circumstances, {})
    assert facts.loop.kind == loop.__module__.partition(".")[0]
    assert facts.loop.is_debug


def test_wall_clock_can_be_judged() -> None:
    is_synchronised, error_s = wall_clock()
    if is_synchronised:
        assert error_s is not None
        assert 0 <= error_s < 3600
    else:
        assert error_s is None


def test_requirements_are_read() -> None:
    requirements = libraries(
        [
            "torch>=2.6",
            "uvloop>=0.19; sys_platform != 'win32'",
            'ray<3,>=2.60; extra == "ray"',
            'pytest>=8; extra == "dev"',
            "no-such-package-here (>=1)",
        ]
    )
    assert [
        (requirement.name, requirement.wanted, requirement.extra)
        for requirement in requirements
    ] == [
        ("torch", ">=2.6", ""),
        ("uvloop", ">=0.19", ""),
        ("ray", "<3,>=2.60", "ray"),
        ("no-such-package-here", ">=1", ""),
    ]
    assert requirements[-1] == LibraryFacts("no-such-package-here", "", ">=1")
    assert {library.name for library in libraries([])} >= {"torch", "msgpack", "uvloop"}


def test_missing_interface_is_reported() -> None:
    options = Options(network=NetworkOptions(interface="none7"))
    facts = gather(Circumstances(options), {"ASYNCRPC_INTERFACE": "none7"})
    assert "none7" in facts.network.trouble
    assert facts.network.chosen_by == "ASYNCRPC_INTERFACE"


@pytest.mark.parametrize(
    ("mode", "words"), [(0o600, ""), (0o644, "has mode 0644"), (0o660, "has mode 0660")]
)
def test_files_readable_by_others_are_reported(
    tmp_path: Path, mode: int, words: str
) -> None:
    path = tmp_path / "key.pem"
    path.write_text("a key")
    path.chmod(mode)
    file = secret_file("Tls.key", str(path))
    assert file.problem.startswith(words)
    assert bool(file.problem) == bool(words)
    tls = Tls(certificate="c.pem", key=path, ca="ca.pem")
    environ = {"ASYNCRPC_SECRET_FILE": str(path)}
    files = gather(Circumstances(Options(tls=tls)), environ).secrets.files
    assert [checked.what for checked in files] == ["ASYNCRPC_SECRET_FILE", "Tls.key"]
    assert all(checked.problem == file.problem for checked in files)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    assert "cannot be read" in secret_file("x", str(tmp_path / "none")).problem


def test_file_system_is_measured(tmp_path: Path) -> None:
    facts = shared_memory(tmp_path)
    assert facts.size is not None
    assert facts.size >= facts.free
    assert facts.is_writable
    assert shared_memory(tmp_path / "none") == SharedMemoryFacts(None)
