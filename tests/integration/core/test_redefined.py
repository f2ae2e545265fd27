"""A function that is defined anew runs as it is now, and its caller learns of old code.

`importlib.reload` gives a module's names other functions; a cell of a notebook that
runs again does, too.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrpc import Options, Policy, Worker
from asyncrpc.errors import DecodeError, RejectedError
from asyncrpc.testing import Cluster
from tests.integration.core.groups import processes

OLD = "was defined anew after it had been called"
Write = Callable[[str], Any]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module, and imports or reloads it."""
    name = "tests_redefined"
    file = tmp_path / f"{name}.py"
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> Any:
        # Of another size each time: else bytecode of the same second is taken for its.
        file.write_text(source.ljust((file.stat().st_size if file.exists() else 0) + 1))
        importlib.invalidate_caches()
        present = sys.modules.get(name)
        if present is None:
            return importlib.import_module(name)
        # A reload keeps what is not defined again.
        for attribute in ("answer", "Answer"):
            vars(present).pop(attribute, None)
        return importlib.reload(present)

    yield write
    sys.modules.pop(name, None)


async def answers(worker: Worker, module: Any) -> list[Any]:
    """Return what every way to name a function leads to."""
    peer = worker.peer("b")
    results = [await peer.call(module.answer)]
    results.append(await peer.remote(module.Answer).rpc_async().get())
    results.append(await peer.call(module.Answer.of_class))
    results.append(await peer.remote(module.answer))
    return results


SOURCE = """
class Answer:
    def get(self): return {0}
    @staticmethod
    def of_class(): return {0}
def answer(): return {0}
"""


async def test_names_lead_to_the_redefined_functions(write: Write) -> None:
    async with Cluster(names=["a", "b"]) as (worker, _):
        assert await answers(worker, write(SOURCE.format(1))) == [1, 1, 1, 1]
        for now in (2, 3):
            module = write(SOURCE.format(now))
            with pytest.warns(RuntimeWarning, match=OLD):
                assert await answers(worker, module) == [now] * 4
            with warnings.catch_warnings(action="error"):  # once for each change
                assert await answers(worker, module) == [now] * 4


@pytest.mark.parametrize("kind", ["async def answer(): return 2", "answer = print"])
async def test_redefined_function_may_be_of_any_kind(write: Write, kind: str) -> None:
    async with Cluster(names=["a"]) as (worker,):
        peer = worker.peer("a")
        assert await peer.call(write("def answer(): return 1").answer) == 1
        module = write(kind)
        assert await peer.call(module.answer) == (None if "print" in kind else 2)
        module = write("def answer(): yield 3")
        assert [item async for item in peer.stream(module.answer)] == [3]


async def test_deleted_function_is_an_error_of_its_call(write: Write) -> None:
    async with Cluster(names=["a"]) as (worker,):
        answer = write("def answer(): return 1").answer
        assert await worker.peer("a").call(answer) == 1
        write("")
        with pytest.raises(DecodeError, match="has no 'answer' on this worker"):
            await worker.peer("a").call(answer)
        assert await worker.peer("a").call(write("def answer(): return 2").answer) == 2


async def test_a_function_that_is_not_exposed_any_more_is_refused(write: Write) -> None:
    async with Cluster(names=["a"], options=Options(policy=Policy.STRICT)) as (worker,):
        exposed = "import asyncrpc\n@asyncrpc.expose\ndef answer(): return 1"
        assert await worker.peer("a").call(write(exposed).answer) == 1
        module = write("def answer(): return 2")
        with pytest.raises(RejectedError, match="whose policy is strict"):
            await worker.peer("a").call(module.answer)


async def test_caller_learns_of_old_code_in_another_process(write: Write) -> None:
    async with processes("b") as worker:
        folder = str(Path(write("def answer(): return 1").__file__).parent)
        await worker.peer("b").call(sys.path.insert, 0, folder)
        assert await worker.peer("b").call(sys.modules["tests_redefined"].answer) == 1
        module = write("def answer(): return 2")
        # To call its own worker first takes the warning from nobody.
        assert await worker.peer("a").call(module.answer) == 2
        with pytest.warns(RuntimeWarning, match=f"tests_redefined:answer {OLD}"):
            assert await worker.peer("b").call(module.answer) == 1
        await worker.peer("b").call(reload_module, "tests_redefined")
        with warnings.catch_warnings(action="error"):
            assert await worker.peer("b").call(module.answer) == 2


def reload_module(name: str) -> None:
    importlib.reload(sys.modules[name])
