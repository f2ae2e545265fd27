"""What another user of the host can find out of a run: everything is tried.

The other user is real: a process that becomes it.  It tries every file, directory and
socket of the run, the processes, and what they tell at names that all users share.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.tools.cli.test_runs import LIMIT_S, run_of

OTHER: Final = 65534
RUNS: Final = f"asyncrpc-runs-{os.geteuid()}"
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user"
)

# Python's own modules only, and imported before it becomes the other user, who may not
# be able to read them.
TRY_ALL: Final = """
import json, os, socket, sys
uid, base, *pids = sys.argv[1:]
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
done = {"read": [], "entered": [], "connected": [], "told": [], "shown": []}

def tries(what, path, act):
    try:
        if act(path):
            done[what].append(path)
    except OSError:
        pass

def read(path):
    flags = os.O_RDONLY | os.O_NONBLOCK
    return bool(os.read(os.open(path, flags), 1)) or True

def connect(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10.0)
        sock.connect(path)
        if path.startswith("\\0"):
            return bool(sock.recv(1))
        return True

for folder, folders, files in os.walk(base):
    for name in folders:
        tries("entered", os.path.join(folder, name), os.listdir)
        tries("entered", os.path.join(folder, name), lambda path: not os.chdir(path))
    for name in files:
        tries("read", os.path.join(folder, name), read)
        tries("connected", os.path.join(folder, name), connect)
for pid in pids:
    for name in ("environ", "maps", "mem", "stack", "syscall", "auxv", "fdinfo/0"):
        tries("read", f"/proc/{pid}/{name}", read)
    tries("entered", f"/proc/{pid}/fd", os.listdir)
    tries("entered", f"/proc/{pid}/map_files", os.listdir)
    with open(f"/proc/{pid}/cmdline") as file:
        done["shown"].append(file.read())
with open("/proc/net/unix") as file:
    names = [line.split()[-1] for line in file if "@asyncrpc" in line]
for name in names:
    if name.startswith("@asyncrpc-look"):
        tries("told", "\\0" + name[1:], connect)
done["names"] = len(names)
print(json.dumps(done))
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory for temporary files that every user can enter and write."""
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def other_user(folder: Path, pids: list[int]) -> dict[str, Any]:
    """Return what another user could do."""
    result = subprocess.run(
        [
            *(sys.executable, "-I", "-c", TRY_ALL, str(OTHER), str(folder)),
            *map(str, pids),
        ],
        capture_output=True,
        check=True,
        text=True,
        timeout=LIMIT_S,
    )
    done: dict[str, Any] = json.loads(result.stdout)
    return done


def processes_of(pid: int) -> list[int]:
    """Return a process, and all that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        pid,
        *(descendant for child in children for descendant in processes_of(int(child))),
    ]


@pytest.mark.parametrize("secret", ["", "a secret of sixteen letters and more"])
def test_run_is_hidden_from_other_users(shared: Path, secret: str) -> None:
    """The run has a umask of 0."""
    own = {"ASYNCRPC_SECRET": secret} if secret else {}
    before = os.umask(0)
    try:
        with run_of(
            shared,
            "work",
            2,
            TMPDIR=str(shared),
            XDG_RUNTIME_DIR=str(shared / "missing" / "session"),
            ASYNCRPC_RUN_DIR="",
            **own,
        ) as run:
            (entry,) = (shared / RUNS).glob("work-*")
            kept = (entry / "secret").read_text()
            assert kept == secret or (not secret and len(kept) == 64)
            pids = processes_of(run.pid)
            assert len(pids) >= 3
            done = other_user(shared, pids)
    finally:
        os.umask(before)
    assert done["names"] > 0
    assert done["read"] == [str(shared / "work.py")]  # which the test has written
    assert done["entered"] == done["connected"] == done["told"] == []
    assert not any(kept in line for line in done["shown"])


@pytest.mark.parametrize("form", ["directory", "link", "file"])
def test_name_taken_by_another_user_is_not_used(shared: Path, form: str) -> None:
    """The place of a user's runs has a name that can be told before."""
    bait, place = shared / "bait", shared / RUNS
    for folder in (bait, bait / "work-1", bait / "work-1" / "workers"):
        folder.mkdir()
        folder.chmod(0o777)
    (bait / "work-1" / "secret").write_text("a secret of somebody else")
    for path in (bait, *bait.rglob("*")):
        os.chown(path, OTHER, OTHER)
    if form == "directory":
        bait.rename(place)
    elif form == "link":
        place.symlink_to(bait)
    else:
        place.write_text("")
    os.chown(place, OTHER, OTHER, follow_symlinks=False)
    listed = [str(entry) for entry in shared.rglob("*")]
    environment = {
        **os.environ,
        "TMPDIR": str(shared),
        "XDG_RUNTIME_DIR": str(shared / "missing" / "session"),
        "ASYNCRPC_RUN_DIR": "",
    }
    run = subprocess.run(
        [*(sys.executable, "-m", "asyncrpc", "run", "--nproc=1", "-m", "this")],
        env=environment,
        capture_output=True,
        check=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "warning: no run directory" in run.stderr
    runs = subprocess.run(
        [sys.executable, "-m", "asyncrpc", "runs"],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT_S,
    )
    assert "no run of yours is under way" in runs.stdout
    assert [str(entry) for entry in shared.rglob("*")] == listed
