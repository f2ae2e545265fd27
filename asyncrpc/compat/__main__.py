"""`python -m asyncrpc.compat`: run a program for torch's RPC, unchanged, on asyncrpc.

    python -m asyncrpc.compat script.py ARGUMENTS
    python -m asyncrpc.compat -m module ARGUMENTS
    torchrun --nproc-per-node 2 -m asyncrpc.compat script.py ARGUMENTS

The program is `__main__` and finds `sys.argv` and `sys.path` as if `python` had started
it.  A script stays `__main__` after its last line, for threads that go on: what they
send names its functions.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

from asyncrpc.compat import install


def main(argv: Sequence[str]) -> None:
    """Install the facade and run a program.

    Args:
        argv: the program and its arguments; without our own name.

    Raises:
        SystemExit: there is no such file, or the program ends by it.
    """
    # Only what comes before the program's own arguments is ours to parse.
    own = 2 if argv[:1] == ["-m"] else 1
    parser = _parser()
    given = parser.parse_args(argv[:own])
    target: str = given.target
    if not given.module and not Path(target).exists():
        parser.error(f"there is no file {target!r}; for a module, use -m")
    install()
    sys.argv = [target, *argv[own:]]
    if given.module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        run_script(target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m asyncrpc.compat",
        usage="%(prog)s [-h] (SCRIPT | -m MODULE) ...",
        description=(
            "Run a program that was written for torch.distributed.rpc on asyncrpc, "
            "unchanged, with its arguments."
        ),
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the program is a module"
    )
    parser.add_argument("target", metavar="SCRIPT", help="the program")
    return parser


def run_script(path: str) -> None:
    """Run a file, or a directory or archive with a `__main__.py`, as `__main__`.

    Raises:
        Exception: whatever the script raises.
    """
    has_own_path = not sys.flags.safe_path  # our own place in it: the script's, now
    if Path(path).is_dir() or zipfile.is_zipfile(path):
        del sys.path[: int(has_own_path)]
        runpy.run_path(path, run_name="__main__")
        return
    if has_own_path:
        sys.path[0] = str(Path(path).resolve().parent)
    file = str(Path(path).absolute())
    module = types.ModuleType("__main__")
    module.__file__ = file
    module.__loader__ = SourceFileLoader("__main__", file)
    sys.modules["__main__"] = module
    code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    exec(code, vars(module))  # noqa: S102  (which is what was asked for)


if __name__ == "__main__":
    main(sys.argv[1:])
