"""`asyncrpc torch-dump`, read by torch's own `torchfrtrace`, of groups that hang."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from asyncrpc import AsyncRpcError, Options, Worker
from asyncrpc.testing import ProcessCluster
from asyncrpc.tools.cli.main import main
from asyncrpc.tools.inspection.group import GroupView, view_of
from asyncrpc.tools.inspection.observer import Observer
from tests.forked import forked
from tests.integration.tools.inspection.ranks import take_part

SECRET: Final = "a secret of this test"
OPTIONS: Final = Options(secret=SECRET, drain_timeout_s=0.0)
GENEROUS_S: Final = 60.0
PAUSE_S: Final = 0.05  # between two looks
THREE: Final = ("a", "b", "c")
FOUR: Final = ("a", "b", "c", "d")
REDUCED: Final = ("all_reduce", "all_reduce")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRPC_SECRET", SECRET)
    monkeypatch.delenv("ASYNCRPC_ADDRESS", raising=False)


def plans_of(
    names: Sequence[str], *operations: str, **others: Sequence[str]
) -> dict[str, Sequence[str]]:
    """Return what each rank does: all the same, but for some that are named."""
    return {name: others.get(name, operations) for name in names}


class Ranks:
    """A group of ranks in processes, and the one here."""

    def __init__(self, cluster: ProcessCluster, names: Sequence[str]) -> None:
        self.cluster = cluster
        self.names = names
        self.worker: Worker = cluster.worker
        self._parts: list[asyncio.Future[None]] = []

    async def until_blocked(self, name: str) -> None:
        """Wait until the loop of a rank does not run."""
        async with asyncio.timeout(GENEROUS_S):
            is_blocked = False
            while not is_blocked:
                snapshot = (await self.view()).snapshots.get(name)
                is_blocked = snapshot is not None and snapshot.blocked_for_s > 0

    def begin(self, plans: Mapping[str, Sequence[str]]) -> None:
        """Let each rank begin its collectives."""
        for name in self.names:
            plan = list(plans[name])
            self._parts.append(
                asyncio.ensure_future(
                    self.worker.peer(name).call(take_part, list(self.names), plan)
                )
            )

    async def view(self) -> GroupView:
        async with Observer(OPTIONS) as observer:
            return await view_of(
                observer,
                self.worker.addresses[0],
                is_thorough=False,
                with_collectives=True,
            )

    async def until(self, ended: Mapping[str, tuple[int, int]]) -> None:
        """Wait until ranks have ended so many collectives, and so many are under way.

        The first of a group is that in which its ranks agree on the way.
        """
        states: dict[str, tuple[int, int]] = {}
        try:
            async with asyncio.timeout(GENEROUS_S):
                while states != dict(ended):
                    await asyncio.sleep(PAUSE_S)
                    view = await self.view()
                    states = {
                        name: (
                            sum(
                                bool(collective.outcome)
                                for collective in history.collectives
                            ),
                            sum(
                                not collective.outcome
                                for collective in history.collectives
                            ),
                        )
                        for name, history in view.collectives.items()
                        if name in ended
                    }
        except TimeoutError:
            pytest.fail(f"not {ended}: {states}")

    async def outcomes(self) -> list[BaseException | None]:
        """Return how the ranks have ended."""
        return await asyncio.gather(*self._parts, return_exceptions=True)

    async def end(self) -> None:
        for part in self._parts:
            part.cancel()
        await self.outcomes()


@contextlib.asynccontextmanager
async def ranks(names: Sequence[str]) -> AsyncIterator[Ranks]:
    cluster = ProcessCluster(
        names[1:], name=names[0], method="forkserver", options=OPTIONS
    )
    async with cluster:
        members = Ranks(cluster, names)
        try:
            yield members
        finally:
            await members.end()


class Dump:
    """Runs the command, and torch's program on what it has written."""

    def __init__(self, folder: Path, printed: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._printed = printed

    async def __call__(self, address: str, *arguments: str) -> tuple[int, str, str]:
        """Return the exit code, and what was written to the output and the error."""
        self._printed.readouterr()
        command = ["torch-dump", address, "--to", str(self.folder), *arguments]
        status = await asyncio.to_thread(main, command)
        printed = self._printed.readouterr()
        return status, printed.out, printed.err

    async def of(self, group: Ranks) -> str:
        """Dump a group of which all answer; return what torch's program says of it."""
        status, out, err = await self(group.worker.addresses[0])
        assert (status, err) == (0, ""), out
        assert len(out.splitlines()) == 1 + len(group.names)
        return await self.traced()

    async def traced(self, *arguments: str) -> str:
        """Return what `torchfrtrace` says."""
        return await asyncio.to_thread(self._traced, [str(self.folder), *arguments])

    def _traced(self, arguments: list[str]) -> str:
        source = f"""
            from torch.distributed.flight_recorder.fr_trace import main
            main({arguments!r})
            print("analysed")
        """
        with forked("\n".join(line.strip() for line in source.splitlines())) as program:
            return program.output.read()


@pytest.fixture
def dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Dump:
    return Dump(tmp_path / "dumps", capsys)


@pytest.mark.parametrize("names", [THREE, FOUR], ids=len)
class TestOfThreeAndFour:
    async def test_dump_of_a_healthy_group_is_clean(
        self, names: Sequence[str], dump: Dump
    ) -> None:
        async with ranks(names) as group:
            group.begin(plans_of(names, "barrier", *REDUCED, "all_gather"))
            assert await group.outcomes() == [None] * len(names)
            assert await dump.of(group) == "analysed\n"

    async def test_dump_names_a_rank_that_skips_a_collective(
        self, names: Sequence[str], dump: Dump
    ) -> None:
        plans = plans_of(names, *REDUCED, "barrier", c=[*REDUCED, "sleep"])
        async with ranks(names) as group:
            group.begin(plans)
            await group.until({name: (3, int(name != "c")) for name in names})
            said = await dump.of(group)
        assert "Not all ranks joining collective, sequence number: 3" in said
        assert "missing ranks: {2}" in said
        assert "collective: gloo:barrier" in said
        assert f"group 'ranks' of {len(names)}" in said
        assert "take_part at " in said
        assert said.endswith("analysed\n")

    async def test_dump_names_a_mismatch_of_collectives(
        self, names: Sequence[str], dump: Dump
    ) -> None:
        plans = plans_of(names, *REDUCED, "all_reduce", b=[*REDUCED, "all_gather"])
        async with ranks(names) as group:
            group.begin(plans)
            outcomes = await group.outcomes()
            assert all(isinstance(result, AsyncRpcError) for result in outcomes)
            said = await dump.of(group)
        assert "Collective sequence number: 3 has errors" in said
        assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in said
        assert "'all_reduce' does not match found collective type: 'all_gather'" in said

    async def test_dead_rank_is_missing_from_the_dump(
        self, names: Sequence[str], dump: Dump
    ) -> None:
        plans = plans_of(names, *REDUCED, "barrier", c=[*REDUCED, "sleep"])
        others = [name for name in names if name != "c"]
        async with ranks(names) as group:
            group.begin(plans)
            await group.until({name: (3, int(name != "c")) for name in names})
            group.cluster.kill("c")
            await group.until(dict.fromkeys(others, (4, 0)))
            status, out, err = await dump(group.worker.addresses[0])
        assert status == 1
        assert len(out.splitlines()) == 1 + len(others)
        assert err.startswith("c has no file: ")
        assert "Missing dump files from ranks {2}" in await dump.traced()
        said = await dump.traced("--allow-incomplete-ranks")
        assert "we missed FR dumps from ranks ({2})" in said


@pytest.mark.slow
async def test_a_blocked_rank_has_a_file(dump: Dump) -> None:
    plans = plans_of(THREE, *REDUCED, "barrier", c=[*REDUCED, "block"])
    async with ranks(THREE) as group:
        group.begin(plans)
        await group.until({"a": (3, 1), "b": (3, 1), "c": (3, 0)})
        await group.until_blocked("c")
        status, out, err = await dump(group.worker.addresses[0])
        said = await dump.traced()
        group.cluster.kill("c")  # nothing else ends it
    assert status == 0, err
    assert len(out.splitlines()) == 4
    assert err == "c is blocked: only its last collectives are included\n"
    assert "missing ranks: {2}" in said


@pytest.mark.slow
async def test_stopped_rank_has_no_file(dump: Dump) -> None:
    async with ranks(THREE) as group:
        group.begin(plans_of(THREE, *REDUCED))
        assert await group.outcomes() == [None] * 3
        group.cluster.kill("c", signal.SIGSTOP)
        try:
            status, out, err = await dump(group.worker.addresses[0], "--json")
        finally:
            group.cluster.kill("c", signal.SIGCONT)
    assert (status, err) == (1, "")
    report = json.loads(out)
    assert sorted(report["files"]) == ["0", "1"]
    assert report["missing"]["c"].startswith("its process is stopped")


async def test_dump_files_are_pickles_of_plain_data(dump: Dump) -> None:
    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name} in a dump")

    async with ranks(THREE) as group:
        group.begin(plans_of(THREE, *REDUCED))
        await group.outcomes()
        await dump(group.worker.addresses[0], "--prefix", "job-7_", "--worker", "b")
    (path,) = dump.folder.iterdir()
    assert path.name == "job-7_1"
    with path.open("rb") as file:
        content = Plain(file).load()
    assert [entry["collective_seq_id"] for entry in content["entries"]] == [0, 1, 2]
    assert {entry["state"] for entry in content["entries"]} == {"completed"}


@pytest.mark.slow
async def test_dump_and_torchfrtrace_work_as_programs(tmp_path: Path) -> None:
    plans = {"a": ["all_reduce"], "b": ["sleep"]}
    program = "from torch.distributed.flight_recorder import fr_trace; fr_trace.main()"
    async with ranks(("a", "b")) as group:
        group.begin(plans)
        await group.until({"a": (0, 2), "b": (0, 0)})
        where = group.worker.addresses[0], "--to", str(tmp_path / "new" / "dumps")
        ours = await run("-m", "asyncrpc", "torch-dump", *where)
    assert ours[0] == 0, ours
    status, said = await run("-c", program, where[-1])
    assert status == 0
    assert "missing ranks: {1}" in said


async def run(*arguments: str) -> tuple[int | None, str]:
    """Run Python in a process of its own; return its status, and what it says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode()


class TestMistakes:
    """They are found before anybody is asked."""

    @pytest.mark.parametrize("prefix", ["", "rank1", "a/b", "ä_"])
    async def test_prefix_unknown_to_torch_is_refused(
        self, dump: Dump, prefix: str
    ) -> None:
        status, _, err = await dump("tcp://127.0.0.1:1", f"--prefix={prefix}")
        assert status == 2
        assert err.startswith("asyncrpc torch-dump: --prefix must be letters")

    async def test_folder_of_an_earlier_dump_is_refused(self, dump: Dump) -> None:
        dump.folder.mkdir()
        (dump.folder / "asyncrpc_rank_9").touch()
        status, _, err = await dump("tcp://127.0.0.1:1")
        assert status == 2
        assert "has 'asyncrpc_rank_9' of an earlier dump" in err

    async def test_file_in_place_of_a_folder_is_refused(self, dump: Dump) -> None:
        dump.folder.touch()
        status, _, err = await dump("tcp://127.0.0.1:1")
        assert status == 2
        assert "--to must be a directory" in err

    async def test_unreachable_worker_is_reported(self, dump: Dump) -> None:
        status, _, err = await dump("tcp://127.0.0.1:1")
        assert status == 2
        assert "no worker answers" in err
        assert not dump.folder.exists()
