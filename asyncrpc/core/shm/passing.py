"""Descriptors on their way through a queue: what cannot be written into memory.

A pair of connected sockets that every process has.  A message is a tag and descriptors;
the kernel keeps both, in order, whether or not the sender lives on.  A tag says to
which item of the queue a message belongs; messages of items that were never put, or
whose taker was killed, are recognized by it and dropped.

Only one process at a time sends or receives: the queue's lock sees to that.

Source: unix(7), SCM_RIGHTS.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

Tag: TypeAlias = tuple[int, int]

_TAG: Final = struct.Struct("<QQ")
_DESCRIPTORS_EACH: Final = 250  # the kernel allows 253 a message
_BUFFER_BYTES: Final = 1 << 20  # as much of it as the host allows
_NO_ROOM: Final = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)


class DescriptorPassage:
    """The two ends, as one process has them."""

    __slots__ = ("_receiving", "_sending")

    def __init__(self, descriptors: tuple[int, int]) -> None:
        self._sending, self._receiving = descriptors

    def send(self, tag: Tag, descriptors: Sequence[int]) -> bool:
        """Send descriptors, which stay ours."""
        name = _TAG.pack(*tag)
        with _socket(self._sending) as sock:
            for start in range(0, len(descriptors), _DESCRIPTORS_EACH):
                some = array.array("i", descriptors[start : start + _DESCRIPTORS_EACH])
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, some)
                try:
                    sock.sendmsg([name], [rights], socket.MSG_DONTWAIT)
                except OSError as error:
                    if error.errno in _NO_ROOM:
                        return False
                    raise
        return True

    def peek(self, tag: Tag, count: int) -> list[int]:
        """Return the descriptors of the first message of a tag, which stays queued."""
        while True:
            queued_tag, descriptors = self._receive(socket.MSG_PEEK)
            if queued_tag != tag:
                close_all(descriptors)
                self._drop()
                continue
            return _complete(descriptors, min(count, _DESCRIPTORS_EACH))

    def take_rest(self, count: int) -> list[int]:
        """Drop the message that was peeked at, and take the others of its tag."""
        self._drop()
        descriptors: list[int] = []
        for start in range(_DESCRIPTORS_EACH, count, _DESCRIPTORS_EACH):
            _, received = self._receive(0)
            descriptors += received
            if len(received) < min(count - start, _DESCRIPTORS_EACH):
                break
        return _complete(descriptors, max(0, count - _DESCRIPTORS_EACH))

    def _drop(self) -> None:
        # Without room for them, the kernel closes the descriptors.
        with _socket(self._receiving) as sock:
            sock.recv(_TAG.size, socket.MSG_DONTWAIT)

    def _receive(self, flags: int) -> tuple[Tag, list[int]]:
        descriptors = array.array("i")
        room = socket.CMSG_SPACE(_DESCRIPTORS_EACH * descriptors.itemsize)
        flags |= socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        with _socket(self._receiving) as sock:
            data, ancillary, _, _ = sock.recvmsg(_TAG.size, room, flags)
        for level, kind, packed in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(
                    packed[: len(packed) - len(packed) % descriptors.itemsize]
                )
        first, second = _TAG.unpack(data)
        return (first, second), list(descriptors)


def new_pair() -> tuple[int, int]:
    """Make the ends of a passage: to send to, and to receive from."""
    sending, receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return sending.detach(), receiving.detach()


@contextlib.contextmanager
def _socket(descriptor: int) -> Iterator[socket.socket]:
    """Lend a descriptor to a socket, which would warn if it were left unclosed."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM, fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()


def close_all(descriptors: Sequence[int]) -> None:
    """Close received descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def _complete(received: list[int], count: int) -> list[int]:
    if len(received) < count:
        close_all(received)
        raise OSError(
            errno.EMFILE,
            f"only {len(received)} of {count} descriptors could be received: this "
            "process has too many open",
        )
    return received
