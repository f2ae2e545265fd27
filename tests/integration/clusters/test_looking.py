"""The commands find a cluster, and its dashboard shows it by its address."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from asyncrpc import Cluster
from asyncrpc.errors import NotStartedError, UsageError


async def command(*arguments: str) -> str:
    """Return what a command of `asyncrpc` prints, without an address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncrpc", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return output.decode()


def entries(folder: Path) -> list[Path]:
    return [*folder.iterdir()]


async def test_commands_find_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRPC_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("ASYNCRPC_RUN_ENTRY", "/of/an/outer/run")
    async with Cluster(2) as cluster:
        (entry,) = entries(tmp_path)
        assert (entry / "secret").stat().st_mode & 0o777 == 0o600
        status = await command("status")
        for name in ("cluster", "w0", "w1"):
            assert f" {name} " in status
        await cluster.stop("w1")
        assert " w1 " not in await command("status")
    assert not entries(tmp_path)


async def test_cluster_without_a_run_directory_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ASYNCRPC_RUN_DIR", str(tmp_path / "file"))
    async with Cluster(1) as cluster:
        assert await cluster["w0"].call(len, "abc") == 3


async def test_dashboard_shows_the_cluster_by_its_address() -> None:
    cluster = Cluster(1)
    with pytest.raises(NotStartedError, match="must be entered first"):
        await cluster.dashboard()
    async with cluster:
        for _ in range(2):
            with pytest.raises(UsageError, match="port must be"):
                await cluster.dashboard(port=-1)
        page, token = (await cluster.dashboard()).split("#token=")
        async with aiohttp.ClientSession() as browser:
            for word, status in ((token, 200), (f"{token}x", 401)):
                sent = {"Authorization": f"Bearer {word}"}
                async with browser.get(f"{page}api/overview", headers=sent) as answer:
                    assert answer.status == status
            async with browser.post(f"{page}login", json={"token": token}) as answer:
                assert answer.ok  # what the page does with an address like this
    async with aiohttp.ClientSession() as browser:
        with pytest.raises(aiohttp.ClientConnectionError):
            await browser.get(page)
