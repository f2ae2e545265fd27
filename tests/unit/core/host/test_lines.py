"""Output of several processes in whole lines."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.host.lines import LinePrefixer, prefix_of


@given(
    stream=st.binary(max_size=200).map(lambda some: some.replace(b"\x01", b"\n")),
    cuts=st.lists(st.integers(0, 200)),
)
def test_pieces_of_a_stream_are_joined_to_lines(stream: bytes, cuts: list[int]) -> None:
    prefixer = LinePrefixer(b"> ")
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    written = b"".join(map(prefixer.feed, pieces)) + prefixer.flush()
    lines = stream.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    assert written == b"".join(b"> " + line + b"\n" for line in lines)


def test_endless_line_is_cut_and_not_stored() -> None:
    prefixer = LinePrefixer(b"> ")
    assert prefixer.feed(b"x" * (1 << 16)) == b"> " + b"x" * (1 << 16) + b"\n"
    assert prefixer.flush() == b""


def test_prefix_is_coloured_on_request_only() -> None:
    assert prefix_of("3", 3, is_coloured=False) == b"[3] "
    assert prefix_of("3", 3, is_coloured=True) == b"\x1b[35m[3]\x1b[0m "
    assert prefix_of("9", 9, is_coloured=True) == b"\x1b[35m[9]\x1b[0m "
