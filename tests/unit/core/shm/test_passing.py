"""Descriptors beside the items of a queue: whole, in order, and none left over."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from asyncrpc.core.shm.passing import DescriptorPassage, close_all, new_pair


@pytest.fixture
def passage() -> Iterator[DescriptorPassage]:
    ends = new_pair()
    yield DescriptorPassage(ends)
    close_all(ends)


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("passed")
    yield descriptor
    os.close(descriptor)


def inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def test_many_descriptors_arrive_in_order(
    passage: DescriptorPassage, file: int
) -> None:
    other = os.memfd_create("other")
    assert passage.send((1, 5), [file] * 599 + [other])
    descriptors = passage.peek((1, 5), 600)
    descriptors += passage.take_rest(600)
    assert [inode(descriptor) for descriptor in descriptors] == [inode(file)] * 599 + [
        inode(other)
    ]
    close_all([*descriptors, other])


def test_peek_takes_nothing(passage: DescriptorPassage, file: int) -> None:
    passage.send((1, 1), [file])
    for _ in range(3):
        descriptors = passage.peek((1, 1), 1)
        assert [inode(descriptor) for descriptor in descriptors] == [inode(file)]
        close_all(descriptors)
    assert passage.take_rest(1) == []
    with pytest.raises(BlockingIOError):
        passage.peek((1, 1), 1)


def test_descriptors_of_unsent_items_are_dropped(
    passage: DescriptorPassage, file: int
) -> None:
    passage.send((1, 7), [file] * 300)  # never put: its sender was killed
    passage.send((2, 7), [file])
    descriptors = passage.peek((2, 7), 1)
    assert len(descriptors) == 1
    close_all(descriptors)


def test_full_passage_refuses_a_send(passage: DescriptorPassage, file: int) -> None:
    sent = 0
    while passage.send((1, sent), [file]):
        sent += 1
        assert sent < 100_000
    assert sent > 10
    for serial in range(sent):
        close_all(passage.peek((1, serial), 1))
        passage.take_rest(1)
