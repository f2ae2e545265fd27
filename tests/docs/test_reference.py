"""The reference pages say what the code says."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrpc import errors
from asyncrpc.core.autograd import contexts
from asyncrpc.core.calls import heads
from asyncrpc.core.loop import threads
from asyncrpc.core.options import (
    DeviceOptions,
    LimitOptions,
    LivenessOptions,
    NetworkOptions,
    Options,
)
from asyncrpc.core.serde import exceptions, kinds
from asyncrpc.core.serde.policy import Limits, Policy
from asyncrpc.core.transport import uds
from asyncrpc.core.wire.frames import (
    CHUNK_BYTES,
    HEAD_BYTES_MAX,
    INLINE_BYTES_MAX,
    FrameKind,
    Hello,
)
from asyncrpc.core.wire.limits import MessageLimits

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = DOCS / "reference"
OPTIONS = [
    Options,
    NetworkOptions,
    LivenessOptions,
    LimitOptions,
    DeviceOptions,
    MessageLimits,
]


def rows(page: str, heading: str = "") -> list[list[str]]:
    """Return the cells of all tables of a page, or of one of its sections."""
    text = (REFERENCE / page).read_text("utf-8")
    if heading:
        text = re.split(rf"^#+ {heading}$", text, flags=re.MULTILINE)[1]
        text = re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def numbered(table_rows: list[list[str]]) -> dict[int, str]:
    """Return the second cell of each row that begins with a number, by number."""
    return {int(row[0]): row[1] for row in table_rows if row[0].isdigit()}


def test_page_of_commands_is_generated() -> None:
    check = subprocess.run(
        [sys.executable, str(DOCS / "make_cli.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_described_with_its_code(name: str) -> None:
    error = getattr(errors, name)
    described = [row for row in rows("errors.md") if f"`{name}`" in row[0]]
    assert len(described) == 1
    if error in errors.AsyncRpcError.by_code.values():
        assert described[0][1] == f"`{error.code}`"


def test_errors_are_indented_below_their_bases() -> None:
    above: list[str] = []
    for row in rows("errors.md"):
        match = re.fullmatch(r"((?:· )*)`(\w+Error)`(?: \(`\w+`\))?", row[0])
        if match is None:
            continue
        depth, name = match[1].count("·"), match[2]
        del above[depth:]
        assert depth == len(above), f"{name} is below a class that is not there"
        bases = [base.__name__ for base in getattr(errors, name).__mro__[1:]]
        assert set(above) <= set(bases), name
        above.append(name)


@pytest.mark.parametrize("record", OPTIONS)
def test_every_option_is_listed_with_its_default(record: type) -> None:
    options = record()
    assert dataclasses.is_dataclass(options)
    listed = {
        row[0].strip("`"): row[1].strip("`")
        for row in rows("limits.md", record.__name__)
        if row[0].startswith("`")
    }
    names = [field.name for field in dataclasses.fields(options)]
    assert list(listed) == names
    for name in names:
        default = getattr(options, name)
        if dataclasses.is_dataclass(default):
            assert listed[name] == f"{type(default).__name__}()"
        elif isinstance(default, Policy):
            assert listed[name] == str(default)
        else:
            assert eval(listed[name], {}) == default, name  # noqa: S307  our own page


def test_every_kind_of_frame_has_its_number() -> None:
    assert numbered(rows("wire-protocol.md", "Kinds")) == {
        kind.value: kind.name for kind in FrameKind
    }


def test_hello_has_the_documented_fields() -> None:
    listed = numbered(rows("wire-protocol.md", "Handshake"))
    names = [field.name.replace("_", " ") for field in dataclasses.fields(Hello)]
    # The preface's table comes before, and is numbered by offset: HELLO's rows win.
    assert [listed[index] for index in range(len(names))] == names


def test_every_code_of_a_value_is_described() -> None:
    source = Path(kinds.__file__).read_text("utf-8")
    codes = dict(re.findall(r"^([A-Z_]+): Final = (\d+)$", source, re.MULTILINE))
    entries = {int(n) for name, n in codes.items() if name.startswith("ENTRY_")}
    flags = {"REQUIRES_GRAD", "PARAMETER", "LEAF", "CONJUGATE", "NEGATIVE", "META"}
    others = flags | {"LENGTH_BYTES"}
    values = {
        int(n)
        for name, n in codes.items()
        if not name.startswith("ENTRY_") and name not in others
    }
    value_rows = [row for row in rows("wire-protocol.md", "Values") if row[0].isdigit()]
    entry_rows = [row for row in value_rows if row[1].startswith("`[")]
    assert {int(row[0]) for row in entry_rows} == entries
    assert {int(row[0]) for row in value_rows if row not in entry_rows} == values
    for row in entry_rows:
        assert row[1].startswith(f"`[{row[0]}, "), row


def test_documented_wire_sizes_are_those_of_the_code() -> None:
    page = (REFERENCE / "wire-protocol.md").read_text("utf-8")
    assert f"more than {INLINE_BYTES_MAX >> 10} KiB MUST be deferred" in page
    assert f"a multiple of {CHUNK_BYTES:,}, and `payload_bytes`" in page


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("functions named on one connection", heads.NAMES_MAX),
        ("ended autograd contexts remembered", contexts.ENDED_MAX),
        ("threads of a worker", threads.THREADS_MAX),
        ("path of a Unix socket", uds.PATH_BYTES_MAX),
        ("head of a frame, HELLO", HEAD_BYTES_MAX),
        ("characters of a traceback or an error's text", exceptions.TEXT_MAX),
        ("containers inside each other", Limits().depth_max),
        ("tensors, arrays, pickles, functions, references", Limits().objects_max),
        ("dimensions of a tensor", Limits().dimensions_max),
    ],
)
def test_documented_limits_are_those_of_the_code(what: str, number: int) -> None:
    listed = {row[0]: row[1] for row in rows("limits.md")}
    assert listed[what] == f"{number:,}"
