"""Whether files are what they were."""

from __future__ import annotations

import os
from pathlib import Path

from asyncrpc.serving.model_host.source_files import SourceSnapshot


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
