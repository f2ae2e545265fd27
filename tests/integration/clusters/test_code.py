"""The program's modules on workers: sent by content, changed, loaded anew."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from asyncrpc import Cluster, CodeUpdate, Options, Policy
from asyncrpc.clusters.code import folders
from asyncrpc.clusters.code.folders import CodeFolder, read_tree
from asyncrpc.errors import ClusterError, EncodeError, UsageError
from tests.cluster_grounds import GROUNDS

STEPS: Final = """
VERSION = {version}
def step():
    return VERSION
def where():
    return __file__
class Model:
    def version(self):
        return VERSION
"""
TRAIN: Final = """
from code_steps import step
def run():
    return step()
"""


class Program:
    """A folder of modules, which this process has imported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "code_train.py").write_text(TRAIN)
        self.write(STEPS.format(version=1))
        self.steps: Any = importlib.import_module("code_steps")
        self.train: Any = importlib.import_module("code_train")

    def write(self, source: str) -> None:
        (self.path / "code_steps.py").write_text(source)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    yield Program(tmp_path)
    for name in ("code_steps", "code_train"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("ground", ["here", "command"])
async def test_workers_have_the_modules_as_long_as_they_run(
    program: Program, ground: str
) -> None:
    async with GROUNDS[ground](2, code=program.path) as cluster:
        files = [await peer.call(program.steps.where) for peer in cluster.peers]
        assert len({*files}) == 2
        assert str(program.path) not in "".join(files)
        models = await cluster.spawn(program.steps.Model)
        assert await models.version() == [1, 1]
        await cluster.restart("w1")
        assert await cluster["w1"].call(program.train.run) == 1
    assert not any(map(os.path.exists, files))


async def test_changed_module_is_refused_until_it_is_sent(program: Program) -> None:
    async with Cluster(1, code=[program.path]) as cluster:
        assert await cluster["w0"].call(program.steps.step) == 1
        program.write(STEPS.format(version=2))
        importlib.reload(program.steps)
        for _ in range(2):
            with pytest.raises(UsageError, match="'code_steps' has changed here"):
                await cluster["w0"].call(program.steps.step)
            with pytest.raises(EncodeError, match="'code_steps' has changed here"):
                await cluster.spawn(program.steps.Model)
        assert await cluster["w0"].call(len, "abc") == 3
        assert (await cluster.update_code()).changed == ("code_steps.py",)
        assert await cluster["w0"].call(program.steps.step) == 2
        await cluster.start()
        assert await cluster["w1"].call(program.steps.step) == 2
        assert await cluster.update_code() == CodeUpdate((), {})


async def test_update_reports_what_it_did_not_replace(program: Program) -> None:
    async with Cluster(2, code=program.path) as cluster:
        assert await cluster["w0"].call(program.train.run) == 1
        models = await cluster.spawn(program.steps.Model, on=["w0"])
        program.write(STEPS.format(version=2))
        update = await cluster.update_code()
        assert update.kept == {
            "w0": (
                "code_train.step is still the former code_steps.step",
                "1 object is still of the former code_steps.Model",
            )
        }
        models.release()
        program.write("VERSION = 3")
        (program.path / "code_train.py").unlink()
        update = await cluster.update_code()
        assert update.changed == ("code_steps.py", "code_train.py")
        assert (
            "code_steps.step has left its source, and is still there"
            in (update.kept["w0"])
        )


async def test_code_that_does_not_load_fails_until_it_is_mended(
    program: Program,
) -> None:
    async with Cluster(1, code=program.path) as cluster:
        assert await cluster["w0"].call(program.steps.step) == 1
        program.write("VERSION =")
        for _ in range(2):
            with pytest.raises(ClusterError, match="'w0' has not loaded the code: inv"):
                await cluster.update_code()
        program.write(STEPS.format(version=2))
        await cluster.update_code()
        importlib.reload(program.steps)
        assert await cluster["w0"].call(program.steps.step) == 2


async def test_wrong_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    wrong: list[Any] = [tmp_path / "none", tmp_path / "notes.txt", "", 5, b"x", [5], {}]
    for code in wrong:
        with pytest.raises(UsageError, match="code must be"):
            Cluster(1, code=code)
    strict = Options(policy=Policy.STRICT)
    with pytest.raises(UsageError, match=r"Policy\.STRICT"):
        Cluster(1, code=tmp_path, options=strict)
    async with Cluster(1) as cluster:
        for _ in range(2):
            with pytest.raises(UsageError, match="needs a cluster with code="):
                await cluster.update_code()


def test_tree_has_modules_and_their_data_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"module.py", "data.json", "package/__init__.py", "package/inner.py"}
    other = {".hidden", ".git/config", "__pycache__/module.pyc", "old.pyc", "env/x.py"}
    for name in (*wanted, *other, "env/pyvenv.cfg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert {*read_tree([CodeFolder.at(tmp_path)]).digests} == wanted
    package = read_tree([CodeFolder.at(tmp_path / "package")])
    assert {*package.digests} == {"package/__init__.py", "package/inner.py"}
    assert {*read_tree([CodeFolder.at(tmp_path / "module.py")]).digests} == {
        "module.py"
    }
    monkeypatch.setattr(folders, "FILES_MAX", 3)
    for _ in range(2):
        with pytest.raises(UsageError, match="more than 3 files"):
            read_tree([CodeFolder.at(tmp_path)])
