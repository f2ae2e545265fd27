"""Slurm's lists: of hosts (`gpu[01-03,7],login`), and of numbers (`3(x2),1`).

Slurm's own program for them, `scontrol show hostnames`, is often missing in containers.

Source: the man page of scontrol, "show hostlist"; slurm.conf, "NodeName".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

from asyncrpc.errors import UsageError

HOSTS_MAX: Final = 1 << 16  # Slurm's own MAX_RANGE for one list
_COUNT: Final = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?", re.ASCII)
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_PART: Final = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list, in its order.

    Args:
        text: names with commas between them; each with any number of ranges in
            brackets, whose numbers keep their width: `a[08-10]` is a08, a09, a10.
    """
    hosts: list[str] = []
    for host in _split(text):
        alternatives = [list(_alternatives(part, text)) for part in _parts(host, text)]
        size = 1
        for several in alternatives:
            size *= len(several)
        if len(hosts) + size > HOSTS_MAX:
            raise _refused(text, f"has more than {HOSTS_MAX} hosts")
        hosts += map("".join, itertools.product(*alternatives))
    return hosts


def first_host(text: str) -> str:
    """Return the first host of a list."""
    hosts = expand_hosts(text)
    if not hosts:
        raise _refused(text, "has no host")
    return hosts[0]


def expand_counts(text: str) -> list[int]:
    """Return the numbers of a list such as `3(x2),1`: 3, 3, 1."""
    counts: list[int] = []
    for item in text.split(","):
        matched = _COUNT.fullmatch(item.strip())
        if matched is None:
            raise UsageError(f"{text!r} is not a list of Slurm's, such as '3(x2),1'")
        times = int(matched[2] or 1)
        if len(counts) + times > HOSTS_MAX:
            raise _refused(text, f"has more than {HOSTS_MAX} numbers")
        counts += [int(matched[1])] * times
    return counts


def _split(text: str) -> Iterator[str]:
    """Split at the commas that are outside of brackets."""
    depth, start = 0, 0
    for at, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if not 0 <= depth <= 1:
            raise _refused(text, "has brackets that do not match")
        if character == "," and not depth:
            if text[start:at].strip():
                yield text[start:at].strip()
            start = at + 1
    if depth:
        raise _refused(text, "has brackets that do not match")
    if text[start:].strip():
        yield text[start:].strip()


def _parts(host: str, text: str) -> list[re.Match[str]]:
    parts = list(_PART.finditer(host))
    if "".join(part.group() for part in parts) != host:
        raise _refused(text, "has brackets that do not match")
    return parts


def _alternatives(part: re.Match[str], text: str) -> Iterator[str]:
    """Yield the alternatives for one part of a name."""
    if part[2] is not None:
        yield part[2]
        return
    for number_range in part[1].split(","):
        matched = _RANGE.fullmatch(number_range)
        if matched is None:
            raise _refused(text, f"has the range {number_range!r}, not like 1 or 01-16")
        first, last = matched[1], matched[2] or matched[1]
        if not int(first) <= int(last) < int(first) + HOSTS_MAX:
            raise _refused(
                text, f"has the range {number_range!r}, which is empty or too long"
            )
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _refused(text: str, why: str) -> UsageError:
    short = text if len(text) <= 100 else f"{text[:100]}..."  # noqa: PLR2004
    return UsageError(f"the list of hosts {short!r} {why}")
