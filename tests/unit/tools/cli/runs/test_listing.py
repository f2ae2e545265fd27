"""The runs under way are listed and chosen from; what dead ones left is removed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrpc.core.host.run_entry import (
    ENTRY_VARIABLE,
    RunEntry,
    RunRecord,
    id_of,
    record_of,
)
from asyncrpc.core.host.run_places import RunPlace
from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import Incarnation
from asyncrpc.errors import UsageError
from asyncrpc.serving.model_host.slot import ModelSlot, SlotNote
from asyncrpc.tools.cli.runs.choosing import choose, others_in, table_of
from asyncrpc.tools.cli.runs.listing import (
    LiveRun,
    RunListing,
    is_stopped,
    list_runs,
    sweep,
)
from asyncrpc.tools.inspection.run_note import (
    RunNote,
    RunNoteFile,
    entry_in,
    note_of,
    read_note,
)

COMMAND = ("train.py", "--lr", "0.1")


@pytest.fixture
def place(tmp_path: Path) -> RunPlace:
    tmp_path.chmod(0o700)
    return RunPlace(tmp_path, "this test")


@pytest.fixture
def entry(place: RunPlace) -> Iterator[RunEntry]:
    new_entry = RunEntry(place, a_record(), "a secret")
    yield new_entry
    new_entry.remove()


def a_record() -> RunRecord:
    return record_of(COMMAND, nprocs=2, began_s=100.0, secret_file="")


def the_run(place: RunPlace) -> LiveRun:
    (run,) = list_runs([place]).runs
    return run


def identity(rank: int = 0) -> WorkerIdentity:
    return WorkerIdentity(f"worker{rank}", rank, 2, is_strict=False)


def write_note(entry: RunEntry, who: WorkerIdentity, *addresses: str) -> RunNoteFile:
    file = RunNoteFile(who, entry.path)
    file.write(addresses)
    return file


def test_run_is_listed_until_it_is_removed(place: RunPlace, entry: RunEntry) -> None:
    run = the_run(place)
    assert run.record == a_record()
    assert run.id == f"train-{os.getpid()}"
    assert run.is_here
    assert run.secret_path is not None
    assert run.secret_path.read_text() == "a secret"
    entry.remove()
    entry.remove()
    assert list_runs([place]).runs == []
    assert list(place.path.iterdir()) == []


def test_run_files_are_private_to_the_user(place: RunPlace, entry: RunEntry) -> None:
    write_note(entry, identity(), "tcp://127.0.0.1:1")
    for path in (entry.path, *entry.path.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_run_with_a_secret_file_refers_to_it(place: RunPlace) -> None:
    record = record_of(COMMAND, nprocs=1, began_s=0.0, secret_file="theirs")
    entry = RunEntry(place, record, None)
    assert the_run(place).secret_path == Path("theirs").absolute()
    assert not (entry.path / "secret").exists()
    entry.remove()


def test_workers_are_listed_by_rank_until_they_end(
    place: RunPlace, entry: RunEntry
) -> None:
    files = [write_note(entry, identity(rank), f"uds:///{rank}") for rank in (1, 0)]
    assert [note.addresses for note in the_run(place).notes] == [
        ("uds:///0",),
        ("uds:///1",),
    ]
    files[0].remove()
    assert [note.name for note in the_run(place).notes] == ["worker0"]


def test_removed_note_is_not_written_again(place: RunPlace, entry: RunEntry) -> None:
    file = write_note(entry, identity(), "uds:///0")
    file.remove()
    file.write(("uds:///0",))
    assert the_run(place).notes == ()


def test_worker_runs_without_the_directory(tmp_path: Path) -> None:
    assert entry_in({}) is entry_in({ENTRY_VARIABLE: ""}) is None
    assert not RunNoteFile(identity(), None).is_wanted
    gone = tmp_path / "gone"
    assert entry_in({ENTRY_VARIABLE: str(gone)}) == gone
    file = RunNoteFile(identity(), gone)
    assert file.is_wanted
    file.write(("uds:///0",))
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_note_of_an_ended_or_reused_process_is_skipped(
    place: RunPlace, entry: RunEntry
) -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as ended:
        ended.wait()
    note = note_of(identity(), ["uds:///0"])
    folder = entry.path / "workers"
    for name, changed in {
        "live": note,
        "ended": note._replace(pid=ended.pid),
        "another": note._replace(started=note.started + 1),
    }.items():
        (folder / f"{name}.json").write_text(changed.as_json())
    if note.started:  # Linux
        assert the_run(place).notes == (note,)
    assert not is_stopped(note)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"null", b'{"rank": "x"}', b"\xff", b"1"]
)
def test_malformed_note_or_record_is_skipped(
    place: RunPlace, entry: RunEntry, text: bytes
) -> None:
    assert read_note(text) is None
    (entry.path / "workers" / "x.json").write_bytes(text)
    assert the_run(place).notes == ()
    (entry.path / "run.json").write_bytes(text)
    assert list_runs([place]).runs == []


def test_record_of_another_version_is_skipped(place: RunPlace, entry: RunEntry) -> None:
    record = json.loads((entry.path / "run.json").read_text())
    (entry.path / "run.json").write_text(json.dumps({**record, "version": 2}))
    assert list_runs([place]).runs == []


KILLED = """
import os, sys
from pathlib import Path
from asyncrpc.core.host.run_entry import RunEntry, record_of
from asyncrpc.core.host.run_places import RunPlace
record = record_of(["killed.py"], nprocs=1, began_s=0.0, secret_file="")
entry = RunEntry(RunPlace(Path(sys.argv[1]), ""), record, "a secret")
print(entry.path.name, flush=True)
sys.stdin.read()
os._exit(1)
"""


def test_directory_of_a_killed_launcher_is_removed(
    place: RunPlace, entry: RunEntry
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(place.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        name = launcher.stdout.readline().strip()
        assert name == f"killed-{launcher.pid}"
        sweep(place)
        assert {run.id for run in list_runs([place]).runs} == {name, entry.path.name}
        launcher.kill()
        launcher.wait()
    assert (place.path / name).exists()
    assert the_run(place).id == entry.path.name
    assert not (place.path / name).exists()


def test_foreign_file_in_the_run_directory_is_left_alone(place: RunPlace) -> None:
    (place.path / "notes.txt").touch()
    (place.path / "folder").mkdir(mode=0o700)
    (place.path / "folder" / "file").touch()
    sweep(place)
    assert list_runs([place]).runs == []
    assert (place.path / "notes.txt").exists()
    assert (place.path / "folder" / "file").exists()


def test_taken_name_gets_a_number(place: RunPlace, entry: RunEntry) -> None:
    second = RunEntry(place, a_record(), None)
    assert second.path.name == f"{entry.path.name}.2"
    assert len(list_runs([place]).runs) == 2
    second.remove()


def test_runs_of_other_hosts_are_marked(place: RunPlace) -> None:
    there = RunEntry(place, replace(a_record(), host_id="there"), None)
    note = RunNote("worker0", 0, 1, 1, Incarnation(5), ("tcp://10.0.0.2:1",))
    (there.path / "workers" / "5.json").write_text(note.as_json())
    run = the_run(place)
    assert not run.is_here
    assert run.notes == (note,)  # whose process cannot be looked at from here
    there.remove()


def test_insecure_directory_is_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    choices = [RunPlace(tmp_path / name, "") for name in ("missing", "open")]
    listing = list_runs(choices)
    assert listing.runs == []
    (problem,) = listing.problems
    assert "open has mode 0777" in problem
    assert listing.looked_at == choices


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["train.py"], "train-7"),
        (["/a/b/my model (2).py", "x"], "my-model-2-7"),
        (["-m", "package.module"], "package.module-7"),
        (["a" * 99 + ".py"], "a" * 16 + "-7"),
        (["...py"], "run-7"),
        ([], "run-7"),
    ],
)
def test_run_is_named_after_its_program(command: list[str], name: str) -> None:
    assert id_of(command, 7) == name


@pytest.fixture
def slot(place: RunPlace) -> Iterator[ModelSlot]:
    """The slot of a model; this process has it."""
    environ = {"ASYNCRPC_RUN_DIR": str(place.path)}
    new_slot = ModelSlot.of("my model", "shop:make", "/shop.py", environ)
    new_slot.secret()
    lock = new_slot.try_lock()
    assert lock is not None
    yield new_slot
    os.close(lock)


def slot_note(*, host_id: str = HOST_ID) -> SlotNote:
    return SlotNote(
        generation="g1",
        pid=os.getpid(),
        addresses=("uds:///model",),
        function="shop:make",
        folder="/srv",
        host="node7",
        host_id=host_id,
        began_s=100.0,
    )


def test_model_is_listed_with_its_web_workers_once_it_listens(
    place: RunPlace, slot: ModelSlot
) -> None:
    assert list_runs([place]).runs == []
    slot.write_note(slot_note())
    for name, rank, address in (("web", -1, "uds:///web"), ("m", 0, "uds:///model")):
        who = WorkerIdentity(name, rank, 1, is_strict=False)
        RunNoteFile(who, slot.path).write([address])
    web = next(note for note in the_run(place).notes if note.name == "web")
    path = slot.path / "workers" / f"{web.incarnation:016x}.json"
    path.write_text(web._replace(pid=os.getppid(), started=0).as_json())
    run = the_run(place)
    assert run.id.startswith("my-model-")
    assert run.is_here
    assert run.record.command == ("ModelHost", "shop:make")
    assert (run.record.pid, run.record.nprocs) == (os.getpid(), 2)
    assert [note.name for note in run.notes] == ["m", "web"]  # who knows all the others
    assert run.secret_path == slot.path / "secret"


def test_model_of_another_container_is_marked_as_such(
    place: RunPlace, slot: ModelSlot
) -> None:
    slot.write_note(slot_note(host_id="another"))
    assert not the_run(place).is_here


def test_directory_of_an_ended_model_stays(place: RunPlace) -> None:
    """Its web workers know the secret in it, and wait for the next process."""
    environ = {"ASYNCRPC_RUN_DIR": str(place.path)}
    slot = ModelSlot.of("model", "shop:make", "/shop.py", environ)
    secret = slot.secret()
    slot.write_note(slot_note())
    sweep(place)
    assert list_runs([place]).runs == []
    assert slot.secret() == secret


NOW_S = 1000.0


def a_run(name: str, pid: int, *, host_id: str = HOST_ID, age_s: float = 41) -> LiveRun:
    command = (f"{name}.py", "--data", "/a/long/path" * 9)
    record = RunRecord(pid, "node7", host_id, command, "/", 4, NOW_S - age_s)
    return LiveRun(Path(f"/r/{name}-{pid}"), record, ())


TRAIN, TEST = a_run("train", 17), a_run("test", 170)
THERE = a_run("there", 18, host_id="another")


def listed(*runs: LiveRun) -> RunListing:
    return RunListing(list(runs), [RunPlace(Path("/r"), "")], [])


def test_only_run_of_this_host_is_chosen() -> None:
    assert choose(listed(TRAIN, THERE), None, NOW_S) is TRAIN


@pytest.mark.parametrize(
    ("wanted", "run"),
    [
        ("train-17", TRAIN),
        ("17", TRAIN),  # and not the one whose process begins so
        ("170", TEST),
        ("te", TEST),
        ("tr", TRAIN),
        ("there", THERE),
    ],
)
def test_run_can_be_named_in_several_ways(wanted: str, run: LiveRun) -> None:
    assert choose(listed(TRAIN, TEST, THERE), wanted, NOW_S) is run


@pytest.mark.parametrize(
    ("listing", "wanted", "words"),
    [
        (listed(TRAIN, TEST), None, r"2 runs .*--run:\nrun .*\ntrain-17 .* 41 s "),
        (listed(TRAIN, TEST), "t", "'t' names more than one run; .*\nrun"),
        (listed(TRAIN, TEST), "x", "'x' names no run; .*\nrun"),
        (listed(TRAIN, THERE), "18", "'18' names no run"),
        (listed(), None, r"no run .* \(looked in /r\).*ADDRESS of any worker"),
        (listed(), "x", "there is no run 'x': no run of yours"),
        (listed(THERE), None, "there-18 is of another host or container"),
    ],
)
def test_ambiguous_choice_is_refused_with_the_known_runs(
    listing: RunListing, wanted: str | None, words: str
) -> None:
    with pytest.raises(UsageError) as raised:
        choose(listing, wanted, NOW_S)
    assert re.search(words, str(raised.value)), raised.value


def test_table_fits_the_width_and_keeps_names_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    longest = a_run("a" * 16, 4194304)
    lines = table_of([longest, TRAIN, THERE], NOW_S).splitlines()
    assert max(map(len, lines)) == 80
    assert lines[1].split()[:5] == ["a" * 16 + "-4194304", "4194304", "41", "s", "0/4"]
    assert "another host or" in lines[3]


def note(name: str, incarnation: int, *addresses: str) -> RunNote:
    return RunNote(name, 0, 7, 1, incarnation, addresses)


def test_workers_of_a_run_that_are_in_another_group_are_named() -> None:
    notes = [
        note("a", 1, "uds:///a"),
        note("b", 2),
        note("c", 3, "uds:///c", "tcp://c"),
    ]
    run = LiveRun(TRAIN.path, TRAIN.record, tuple(notes))
    assert others_in(run, {1, 2, 3, 4}) == ""
    assert others_in(TRAIN, {1}) == ""
    assert others_in(run, {1, 2}) == (
        "1 worker is of run train-17, but not in this group: c; to look at them: --run "
        "train-17 uds:///c"
    )
    assert others_in(run, {1, 3}) == (
        "1 worker is of run train-17, but not in this group: b"
    )
    many = tuple(note(f"w{number}", number) for number in range(9))
    assert others_in(LiveRun(TRAIN.path, TRAIN.record, many), {0}) == (
        "8 workers are of run train-17, but not in this group: w1, w2, w3, w4 and 4 "
        "more"
    )
