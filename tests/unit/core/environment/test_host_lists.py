"""Lists of hosts expand as `scontrol show hostnames` expands them."""

from __future__ import annotations

import pytest

from asyncrpc.core.environment.host_lists import expand_counts, expand_hosts, first_host
from asyncrpc.errors import UsageError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-10]", ["node08", "node09", "node10"]),
        (
            "a[01-02,7]b[1-2],c",
            [*["a01b1", "a01b2", "a02b1", "a02b2", "a7b1", "a7b2", "c"]],
        ),
        ("gpu-[1,3].cluster.org", ["gpu-1.cluster.org", "gpu-3.cluster.org"]),
        ("a , b,", ["a", "b"]),
    ],
)
def test_host_list_is_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a[1-2", "brackets that do not match"),
        ("a1-2]", "brackets that do not match"),
        ("a[[1]]", "brackets that do not match"),
        ("a[x]", "range 'x'"),
        ("a[]", "range ''"),
        ("a[3-1]", "empty or too long"),
        ("a[0-99999999]", "empty or too long"),
        ("a[0-999]b[0-999]", "more than 65536 hosts"),
    ],
)
def test_malformed_host_list_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        expand_hosts(text)


def test_empty_host_list_has_no_first_host() -> None:
    with pytest.raises(UsageError, match="has no host"):
        first_host(",")


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("3(x2),1", [3, 3, 1]), ("1(x2)", [1, 1])]
)
def test_task_counts_are_expanded(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "3(2)", "1(x999999)"])
def test_malformed_task_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        expand_counts(text)
