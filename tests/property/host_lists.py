"""Lists of hosts as Slurm writes them, made together with what they mean."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

NAMES = st.from_regex(r"[a-z]([a-z-]{0,3}[a-z])?", fullmatch=True)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Draw what stands in brackets, and the numbers that it means."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 120))
        last = first + draw(st.integers(0, 12))
        width = draw(st.integers(1, 4))
        begin, end = str(first).zfill(width), str(last).zfill(width)
        # A number that is longer than its width begins a range without zeros.
        texts.append(begin if first == last else f"{begin}-{end}")
        numbers += [str(number).zfill(len(begin)) for number in range(first, last + 1)]
    return f"[{','.join(texts)}]", numbers


@st.composite
def host_lists(draw: st.DrawFn, *, has_suffixes: bool = True) -> tuple[str, list[str]]:
    """Draw a list, and the hosts that it means.

    Args:
        has_suffixes: whether names may go on after their last bracket; Slurm 22.05
            writes no such list, and does not read one.
    """
    texts: list[str] = []
    hosts: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        text = ""
        parts: list[list[str]] = []
        groups = draw(st.integers(0, 2))
        for _ in range(groups):
            name, (bracket, numbers) = draw(NAMES), draw(ranges())
            text, parts = text + name + bracket, [*parts, [name], numbers]
        if not groups or (has_suffixes and draw(st.booleans())):
            name = draw(NAMES)
            text, parts = text + name, [*parts, [name]]
        texts.append(text)
        hosts += map("".join, itertools.product(*parts))
    return ",".join(texts), hosts
