"""A list of hosts means what it was made of; no text breaks the reader.

tests/clusters/slurm compares it with `scontrol show hostnames`.
"""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.environment.slurm import HOSTS_MAX, expand_counts, expand_hosts
from asyncrpc.errors import UsageError
from tests.property.host_lists import host_lists


@given(host_lists())
def test_host_list_expands_to_its_hosts(list_and_hosts: tuple[str, list[str]]) -> None:
    text, hosts = list_and_hosts
    assert expand_hosts(text) == hosts


@given(st.text(st.sampled_from("a1-,[]() x0"), max_size=30))
def test_any_text_is_a_host_list_or_is_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        hosts = expand_hosts(text)
        assert len(hosts) <= HOSTS_MAX
        assert not any(set(host) & set("[],") for host in hosts)
    with contextlib.suppress(UsageError):
        assert len(expand_counts(text)) <= HOSTS_MAX


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1))
def test_task_counts_expand_to_their_numbers(counts: list[tuple[int, int]]) -> None:
    text = ",".join(
        f"{count}(x{times})" if times > 1 else f"{count}" for count, times in counts
    )
    assert expand_counts(text) == [
        count for count, times in counts for _ in range(times)
    ]
