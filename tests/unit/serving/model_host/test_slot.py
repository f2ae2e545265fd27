"""The slot of a model process, the function that makes its model, and their files."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.options import Options
from asyncrpc.errors import NotStartedError, UsageError
from asyncrpc.serving import ModelHost, ModelHostStatus
from asyncrpc.serving.model_host.hosted import SourceSnapshot
from asyncrpc.serving.model_host.order import (
    HostOrder,
    file_of,
    main_for,
    name_of_function,
    resolve,
)
from asyncrpc.serving.model_host.slot import (
    ModelSlot,
    Sighting,
    SlotNote,
    read_slot_note,
)
from asyncrpc.tools.inspection.run_note import note_of

NOTE = SlotNote(
    "g1",
    4711,
    ("uds:///tmp/x/worker",),
    function="app:make",
    folder="/srv",
    host="node7",
    host_id="here",
    began_s=1000.0,
)


def slot_in(tmp_path: Path, *identity: str) -> ModelSlot:
    name, function, file = identity or ("model", "app:make", "/app.py")
    return ModelSlot.of(name, function, file, {"ASYNCRPC_RUN_DIR": str(tmp_path)})


def test_slot_has_one_lock_at_a_time(tmp_path: Path) -> None:
    slot = slot_in(tmp_path)
    assert not slot.look().is_held
    lock = slot.try_lock()
    assert lock is not None
    assert slot.try_lock() is None
    seen = slot.look()
    assert (seen.is_held, seen.note) == (True, None)
    os.close(lock)
    assert not slot.look().is_held


def test_lock_with_a_removed_file_blocks_no_process(tmp_path: Path) -> None:
    """A cleaner of temporary files may do so; there may be two processes then."""
    slot = slot_in(tmp_path)
    first = slot.try_lock()
    (slot.path / "lock").unlink()
    assert not slot.look().is_held
    second = slot.try_lock()
    assert first is not None
    assert second is not None
    assert slot.look().is_held
    os.close(first)
    assert slot.look().is_held
    os.close(second)


def test_removed_directory_is_created_again(tmp_path: Path) -> None:
    slot = slot_in(tmp_path)
    shutil.rmtree(slot.path)
    lock = slot.try_lock()
    assert lock is not None
    os.close(lock)


def test_note_of_a_dead_process_is_not_read(tmp_path: Path) -> None:
    slot = slot_in(tmp_path)
    lock = slot.try_lock()
    assert lock is not None
    slot.write_note(NOTE)
    assert slot.look().note == NOTE
    os.close(lock)  # as the kernel does
    assert slot.look().note is None
    again = slot.try_lock()
    assert again is not None
    assert slot.look() == Sighting(is_held=True, note=None)
    slot.remove_note()  # which is not there
    os.close(again)


@pytest.mark.parametrize("text", [None, b"", b"{", b"[]", b'{"generation": 1}', b"7"])
def test_malformed_note_is_ignored(text: bytes | None) -> None:
    assert read_slot_note(text) is None


def test_note_is_read_as_it_was_written() -> None:
    assert read_slot_note(NOTE.as_json()) == NOTE


def test_slot_differs_by_name_function_and_file(tmp_path: Path) -> None:
    identities = [
        ("model", "app:make", "/a/app.py"),
        ("model", "app:make", "/b/app.py"),
        ("model", "app:other", "/a/app.py"),
        ("other", "app:make", "/a/app.py"),
        ("a/../model", "app:make", "/a/app.py"),
    ]
    slots = [slot_in(tmp_path, *identity) for identity in identities]
    assert len({slot.path for slot in slots}) == len(identities)
    assert {slot.path.parent for slot in slots} == {tmp_path / "models"}
    assert slot_in(tmp_path, *identities[0]).path == slots[0].path


def test_secret_is_drawn_once_and_private(tmp_path: Path) -> None:
    slot = slot_in(tmp_path)
    secret = slot.secret()
    assert slot.secret() == secret
    assert len(secret) == 64
    path = slot.path / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(slot.path.stat().st_mode) == 0o700
    assert {file.name for file in slot.path.iterdir()} == {"secret", "workers"}
    path.chmod(0o644)
    with pytest.raises(UsageError, match="has mode 0644"):
        slot.secret()


def test_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("in the way", encoding="ascii")
    with pytest.raises(UsageError, match="set ASYNCRPC_RUN_DIR to another directory"):
        slot_in(tmp_path)


def test_used_slot_keeps_its_files_fresh(tmp_path: Path) -> None:
    slot = slot_in(tmp_path)
    slot.secret()
    note = note_of(WorkerIdentity("web", -1, 2, is_strict=False), ["uds:///x"])
    (slot.path / "workers" / "live.json").write_text(note.as_json(), encoding="ascii")
    all_of_it = (slot.path, *slot.path.rglob("*"))
    assert len(all_of_it) == 4
    for path in all_of_it:
        os.utime(path, (1, 1))
    slot.keep_fresh()
    assert min(path.stat().st_mtime for path in all_of_it) > 1


def test_note_of_a_killed_web_worker_is_removed(tmp_path: Path) -> None:
    slot = slot_in(tmp_path)
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as ended:
        ended.wait()
    note = note_of(WorkerIdentity("web", -1, 2, is_strict=False), ["uds:///x"])
    files = {
        "killed.json": note._replace(pid=ended.pid).as_json(),
        "live.json": note.as_json(),
        "other.json": "no note",
    }
    for name, text in files.items():
        (slot.path / "workers" / name).write_text(text, encoding="ascii")
    slot.keep_fresh()
    left = {file.name for file in (slot.path / "workers").iterdir()}
    assert left == {"live.json", "other.json"}


def make() -> int:
    return 7


def order_for(function: str) -> HostOrder:
    return HostOrder(
        name="model",
        function=function,
        version="",
        generation="g",
        linger_s=0.0,
        folder="/nowhere",
        options=Options(),
        main={},
        secret=b"hidden",
    )


def test_function_is_found_by_its_name() -> None:
    name = name_of_function(make)
    assert name == f"{__name__}:make"
    assert name_of_function(name) == name
    assert resolve(order_for(name)) is make
    assert file_of(name) == __file__
    assert main_for(name) == {}


@pytest.mark.parametrize(
    "wrong", ["make", "a:", ":b", "a b:c", "a..b:c", 7, None, b"a:b"]
)
def test_malformed_function_name_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="make_model must be a function at the top"):
        name_of_function(wrong)


def test_function_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be imported by another process"):
        name_of_function(lambda: 7)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("no_such_module_here:make", "there is no module 'no_such_module_here'"),
        ("asyncrpc.no_such:make", "there is no module 'asyncrpc.no_such'"),
        ("no_such_package.inner:make", "No module named 'no_such_package'"),
    ],
)
def test_missing_module_is_named(function: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        file_of(function)


def test_module_is_found_without_an_import() -> None:
    assert Path(file_of("this:make")).name == "this.py"


@pytest.mark.parametrize("name", ["absent", "PATTERN.x"])
def test_name_that_leads_nowhere_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"has no function '{name}'"):
        resolve(order_for(f"{__name__}:{name}"))


def test_secret_is_in_no_text() -> None:
    assert "hidden" not in repr(order_for("a:b"))


async def test_unentered_host_is_an_error() -> None:
    host = ModelHost(make)
    assert host.status == ModelHostStatus("seeking", "", 0, "")
    for use in (lambda: host.model, lambda: host.peer, lambda: host.worker):
        with pytest.raises(NotStartedError, match="async with serving"):
            use()
    with pytest.raises(NotStartedError, match="async with serving"):
        await host.wait_ready()
    for wrong in (-1, float("inf"), float("nan"), "1", True):
        with pytest.raises(UsageError, match="timeout_s must be a finite number"):
            await host.wait_ready(wrong)  # type: ignore[arg-type]


def test_unchanged_files_are_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("1", encoding="ascii")
    assert SourceSnapshot([str(path), str(tmp_path / "absent.py")]).changed() == ""


def test_changed_file_is_named(tmp_path: Path) -> None:
    """By its size, or its time alone, or that it is gone."""
    path = tmp_path / "a.py"
    path.write_text("1", encoding="ascii")
    os.utime(path, ns=(1, 1))
    seen = SourceSnapshot([str(path)])
    path.write_text("22", encoding="ascii")
    os.utime(path, ns=(1, 1))
    assert seen.changed() == str(path)
    path.write_text("1", encoding="ascii")
    os.utime(path, ns=(1, 1))
    assert seen.changed() == ""
    os.utime(path, ns=(1, 2))
    assert seen.changed() == str(path)
    path.unlink()
    assert seen.changed() == str(path)


def test_modules_of_this_process_are_watched() -> None:
    seen = SourceSnapshot.of_this_process()
    assert seen.changed() == ""
    assert __file__ in seen._stamps  # noqa: SLF001  (what it looks at)
