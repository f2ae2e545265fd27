"""What stands for a name that the facade has not: who uses it fails, and is told why.

A test module imports names of torch at its top.  If one of them is missing, the module
must import nevertheless, so that the other tests run; so a placeholder does nothing
harmful while test modules are imported, and raises at any use later.

An exception may be swallowed by a test, or by the implementation.  So whatever is
noticed also leaves a mark: a line in a file of the folder that belongs to the test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

MISSING = "missing"  # the files of marks
LEAKED = "leaked"


class NotProvidedError(Exception):
    """The implementation lacks a name that the test uses."""


class LeakedError(Exception):
    """The test reached torch's own RPC although another implementation is tested."""


class Marks:
    """Where marks are left, and whether test modules are still being imported."""

    def __init__(self, folder: Callable[[], str | None]) -> None:
        """Look for the folder at each mark: each test has one of its own."""
        self.importing = True
        self.met: set[str] = set()  # placeholders used while modules were imported
        self._folder = folder

    def leave(self, kind: str, name: str) -> None:
        folder = self._folder()
        if folder is not None:
            with (Path(folder) / kind).open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")

    def missing(self, name: str) -> NoReturn:
        self.leave(MISSING, name)
        raise NotProvidedError(f"the implementation does not provide {name}")

    def leaked(self, name: str) -> NoReturn:
        self.leave(LEAKED, name)
        raise LeakedError(f"{name} was called: torch's own RPC is not under test")


def read_marks(folder: Path, kind: str) -> tuple[str, ...]:
    """Return what was noticed in any rank of a test, each name once."""
    path = folder / kind
    if not path.exists():
        return ()
    return tuple(sorted(set(path.read_text("utf-8").splitlines())))


class Missing:
    """Stands for a name that the implementation lacks; any use of it fails the test."""

    def __init__(self, path: str, marks: Marks) -> None:
        vars(self).update(_path=path, _marks=marks)
        if marks.importing:
            marks.met.add(path)

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        if self._marks.importing:  # a decorator
            return Missing(f"{self._path}(...)", self._marks)
        return self._fail()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._path}.{name}", self._marks)

    def __setattr__(self, name: str, value: object) -> None:
        self._fail()

    def __getitem__(self, key: object) -> Any:
        if self._marks.importing:  # an annotation
            return Missing(f"{self._path}[...]", self._marks)
        return self._fail()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Be the base of a class, which imports and cannot be made."""
        return (type("MissingBase", (), {"__init__": self._fail}),)

    def __instancecheck__(self, instance: object) -> bool:
        return self._fail()

    def __repr__(self) -> str:
        return f"<missing {self._path}>"

    def _fail(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        marks: Marks = self._marks
        marks.missing(self._path)

    __enter__ = __exit__ = __iter__ = __len__ = __bool__ = _fail
    __add__ = __radd__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = _fail
    __int__ = __float__ = __index__ = _fail
    __reduce_ex__ = _fail
