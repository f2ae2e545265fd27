"""The files that a program sends to its workers: found, read and named by content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from asyncrpc.core.arguments import wrong
from asyncrpc.errors import UsageError

FILES_MAX: Final = 10_000
BYTES_MAX: Final = 256 << 20  # of all files: what is larger is data, and has other ways
_LEFT_OUT: Final = frozenset({"__pycache__", "node_modules"})
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class CodeTree:
    """The files at one moment.

    Attributes:
        digests: of the content of each file, by its path below the place where Python
            looks for modules.
        contents: by digest.
    """

    digests: Mapping[str, bytes]
    contents: Mapping[bytes, bytes] = field(repr=False)

    def changed_from(self, former: CodeTree) -> list[str]:
        """Return the paths that were added, changed or removed, in order."""
        paths = {*self.digests, *former.digests}
        return sorted(
            path for path in paths if self.digests.get(path) != former.digests.get(path)
        )


@dataclass(frozen=True, slots=True)
class CodeFolder:
    """What the program sends: a folder of modules, a package or one module.

    Attributes:
        path: of it.
        root: where Python looks for its modules.
    """

    path: Path
    root: Path

    @classmethod
    def at(cls, text: str | os.PathLike[str]) -> CodeFolder:
        """Return what is at a path; UsageError: there is nothing of this kind."""
        is_empty = type(text) is str and not text
        if is_empty or not issubclass(type(text), (str, os.PathLike)):
            raise wrong("code", "a path, or a list of paths", text)
        try:
            path = Path(text).resolve()
            is_package = (path / "__init__.py").is_file()
        except (TypeError, ValueError, OSError) as error:
            raise wrong("code", "a path, or a list of paths", text) from error
        if path.is_dir():
            return cls(path, path.parent if is_package else path)
        if path.suffix == ".py" and path.is_file():
            return cls(path, path.parent)
        raise UsageError(
            f"code must be a folder of modules, a package or a module, and {path} is"
            " not there, or is another file"
        )

    def files(self) -> Iterator[Path]:
        """Yield its files, without hidden ones and those of environments."""
        if self.path.is_file():
            yield self.path
            return
        for folder, folders, names in os.walk(self.path):
            here = Path(folder)
            folders[:] = sorted(
                name
                for name in folders
                if not name.startswith(".")
                and name not in _LEFT_OUT
                and not (here / name / "pyvenv.cfg").exists()
            )
            for name in sorted(names):
                path = here / name
                is_hidden = name.startswith(".") or path.suffix == ".pyc"
                if not is_hidden and path.is_file():
                    yield path


def digest_of(content: bytes) -> bytes:
    """Return what names a content."""
    return hashlib.sha256(content).digest()[:_DIGEST_BYTES]


def read_tree(folders: Sequence[CodeFolder]) -> CodeTree:
    """Read the files of folders; it blocks.

    UsageError: a file cannot be read, or they are too many or too large.
    """
    digests: dict[str, bytes] = {}
    contents: dict[bytes, bytes] = {}
    size = 0
    for folder in folders:
        for path in folder.files():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise UsageError(f"code cannot be read: {error}") from error
            size += len(content)
            if len(digests) >= FILES_MAX or size > BYTES_MAX:
                raise UsageError(
                    f"code has more than {FILES_MAX:,} files or {BYTES_MAX >> 20} MiB:"
                    f" {folder.path} holds more than modules (the last file looked at"
                    f" is {path}); name the packages that workers need"
                )
            digest = digest_of(content)
            contents[digest] = content
            digests[path.relative_to(folder.root).as_posix()] = digest
    return CodeTree(digests, contents)
