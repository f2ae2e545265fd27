"""`python -m asyncrpc.compat`: run a program for torch's RPC, unchanged, on asyncrpc.

    python -m asyncrpc.compat script.py ARGUMENTS
    python -m asyncrpc.compat -m module ARGUMENTS
    torchrun --nproc-per-node 2 -m asyncrpc.compat script.py ARGUMENTS

The program is `__main__`, with `sys.argv` and `sys.path` as if `python` had started it.
It stays `__main__` after its last line, for threads that continue: the messages that
they send name its functions.  (`runpy` would put our own module back.)
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import types
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from asyncrpc.compat import install


def main(argv: Sequence[str]) -> None:
    """Install the facade and run a program."""
    # We parse only what comes before the program's own arguments.
    own = 2 if argv[:1] == ["-m"] else 1
    parser = _parser()
    arguments = parser.parse_args(argv[:own])
    target: str = arguments.target
    install()
    sys.argv = [target, *argv[own:]]
    try:
        program = _module(target) if arguments.module else _script(target)
    except FileNotFoundError as error:
        parser.error(str(error))
    _run(*program)


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


def _script(path: str) -> tuple[types.ModuleType, types.CodeType]:
    """Load a file, or the `__main__.py` of a directory or an archive."""
    if not Path(path).exists():
        raise FileNotFoundError(
            f"the file {path!r} does not exist; for a module, use -m"
        )
    if Path(path).is_dir() or zipfile.is_zipfile(path):
        sys.path[: _own_entries()] = [path]
        return _loaded(PathFinder.find_spec("__main__", [path]), path)
    if _own_entries():
        sys.path[0] = str(Path(path).resolve().parent)
    file = str(Path(path).absolute())
    module = types.ModuleType("__main__")
    module.__file__ = file
    module.__loader__ = SourceFileLoader("__main__", file)
    return module, compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)


def _own_entries() -> int:
    """Return the number of entries that our own start has added to the path."""
    return 0 if sys.flags.safe_path else 1


def _module(name: str) -> tuple[types.ModuleType, types.CodeType]:
    """Load a module, or the `__main__` of a package."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise FileNotFoundError(f"there is no module {name!r}: {error}") from error
    if spec is None:
        raise FileNotFoundError(f"there is no module {name!r}")
    module, code = _loaded(spec, name)
    sys.argv[0] = str(module.__file__)
    return module, code


def _loaded(
    spec: ModuleSpec | None, target: str
) -> tuple[types.ModuleType, types.CodeType]:
    """Make the module of a specification, and get its code."""
    loader: Any = None if spec is None else spec.loader
    code = loader.get_code(spec.name) if spec and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise FileNotFoundError(f"there is no program to run in {target!r}")
    module = importlib.util.module_from_spec(spec)
    module.__name__ = "__main__"
    return module, code


def _run(module: types.ModuleType, code: types.CodeType) -> None:
    """Run a program as the main module."""
    sys.modules["__main__"] = module
    # In a spawned process, classes of the main module have this name, and return.
    sys.modules["__mp_main__"] = module
    exec(code, vars(module))  # noqa: S102  (which is what was asked for)


if __name__ == "__main__":
    main(sys.argv[1:])
