"""How a host server begins on a host of which nothing is known yet.

The command line that starts it reads two lines: a program, and settings as JSON.  So
nothing of the program, its environment or its paths is on a command line.  The boot
program itself must run on any Python 3: it says what is missing.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

_READER: Final = "import sys; exec(eval(sys.stdin.readline()))"

# It is told of a wrong Python before it loads what would be a riddle there.
_BOOT: Final = """
import json, os
settings = json.loads(sys.stdin.readline())
def refuse(problem):
    sys.stderr.write("asyncrpc: " + problem + "\\n")
    sys.stderr.flush()
    os._exit(3)
here = "%d.%d" % sys.version_info[:2]
if here != settings["python_version"]:
    refuse("%s is Python %s, and the program runs on %s; give python=..." % (
        sys.executable, here, settings["python_version"]))
frames = os.dup(1)
os.dup2(2, 1)
try:
    if settings["directory"]:
        os.chdir(settings["directory"])
except OSError as error:
    refuse("the directory of the program is not there: %s; give directory=..." % error)
os.environ.update(settings["environment"])
sys.path[:0] = [path for path in settings["path"] if os.path.isdir(path)]
try:
    from asyncrpc.clusters.remote.server import main
except ImportError as error:
    refuse("%s cannot load asyncrpc: %s; install asyncrpc and torch for it, or give "
        "python=... of another" % (sys.executable, error))
main(frames)
"""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a host server is told before it loads asyncrpc.

    Attributes:
        python: the interpreter.
        directory: where the workers run; empty: where the server happens to begin.
        path: of modules of the program; those that are not there are left out.
        environment: variables beside those of the host; not shown in any text.
    """

    python: str
    directory: str
    path: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)

    @property
    def words(self) -> list[str]:
        """The command."""
        return [self.python, "-u", "-c", _READER]

    @property
    def shell_command(self) -> str:
        """The command, for a shell of any kind."""
        return "exec " + shlex.join(self.words)

    @property
    def first_lines(self) -> bytes:
        """What the command reads first."""
        settings = {
            "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
            "directory": self.directory,
            "path": list(self.path),
            "environment": dict(self.environment),
        }
        return f"{_BOOT!a}\n{json.dumps(settings)}\n".encode("ascii")


def settings_for(
    python: str | None, directory: str | None, environment: Mapping[str, str]
) -> ServerSettings:
    """Return the settings of a host that sees the program's files.

    Args:
        python: the interpreter there; None: at the path of the program's own.
        directory: where the program's working directory is there; None: at the same
            path.
        environment: variables beside those of the host.
    """
    here, there = os.getcwd(), directory or ""  # noqa: PTH109  (a text, as it travels)
    return ServerSettings(
        python=python or sys.executable,
        directory=there or here,
        path=[moved(path, here, there) for path in _path_of_program()],
        environment=environment,
    )


def _path_of_program() -> list[str]:
    """Return the parts of `sys.path` that are the program's, not its Python's."""
    own = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    return [
        path
        for path in sys.path
        if path and not any(path.startswith(f"{prefix}/") for prefix in own)
    ]


def moved(path: str, begin: str, end: str) -> str:
    """Return a path below one directory as a path below another."""
    is_below = path == begin or path.startswith(begin.rstrip("/") + "/")
    return end + path[len(begin.rstrip("/")) :] if end and is_below else path
