"""The account of one peer: what it makes a worker hold without credit, in one sum.

So a peer that reaches for several limits at once takes no more than one that reaches
for one.

    what                                    counted as
    a call, or message that is answered     `CALL_BYTES`, while it is served
    its arguments and its head              the most that they may take; once the
                                            account is half full, what they do take
    answers that the peer does not take     as they are kept
    what services keep for it               as they say: see `HoldsForPeers`

Large requests have credit (`credit`), which the user's options limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Final

from asyncrpc.errors import OverloadedError
from asyncrpc.serde.bounds import CONTAINER, values_in

if TYPE_CHECKING:
    from asyncrpc.runtime.calls.requests import CallAdmission

# Bytes, as measured.  A value is one as `serde.bounds` counts them.
CALL_BYTES: Final = 3584
VALUE_BYTES: Final = 64
# What a byte of a short message takes at most: an empty list; and of a text alone.
BYTE_BYTES_MAX: Final = 88
TEXT_BYTE_BYTES: Final = 4

# Requests of up to so many bytes go without credit: the path of a small call knows
# nothing of it.
FREE_BYTES_MAX: Final = 8 << 10
# A longer head of a request is weighed, however few calls run; the values in one are
# counted, some 0.5 us each, if it is no longer than this.
HEAD_BYTES_MAX: Final = 1 << 10
COUNTED_HEAD_BYTES_MAX: Final = 256
COUNTED: Final = -2  # as a weight: it is known once the message has been decoded

PEERS: Final = 16  # that may have their whole part at a time
# Up to so many calls at a time short ones are not weighed: they take 30 MiB at most.
UNWEIGHED_CALLS_MAX: Final = 32
WATCHED_BYTES_MIN: Final = 1 << 20
RETRY_AFTER_S: Final = 1.0


class PeerMemory:
    """What one peer makes a worker hold without credit, in one sum.

    Attributes:
        held_bytes: besides its calls and the answers that it has not taken.
        kept_bytes: answers that it has not taken, as of the last look at them.
        limit_bytes: of the sum.
        is_watched: whether its next call is weighed, however short that is.
    """

    __slots__ = (
        "_admission",
        "_calls",
        "_is_pressed",
        "_services_hold",
        "held_bytes",
        "is_watched",
        "kept_bytes",
        "limit_bytes",
    )

    def __init__(
        self,
        admission: CallAdmission,
        calls: Sized,
        services_hold: Callable[[], int],
        limit_bytes: int,
    ) -> None:
        """Begin with nothing.

        Args:
            admission: counts what all peers hold.
            calls: of the peer that are served.
            services_hold: returns how many bytes services keep for it.
            limit_bytes: of the sum.
        """
        self._admission = admission
        self._calls = calls
        self._services_hold = services_hold
        self.limit_bytes = limit_bytes
        self._is_pressed = False
        self.held_bytes = self.kept_bytes = 0
        self.is_watched = False

    @property
    def used_bytes(self) -> int:
        """Return the sum."""
        held_bytes = self.held_bytes + CALL_BYTES * len(self._calls)
        return held_bytes + self.kept_bytes + self._services_hold()

    @property
    def is_half_full(self) -> bool:
        """Return whether what comes is weighed exactly."""
        return self.used_bytes > self.limit_bytes // 2

    def check(self, nbytes: int = 0) -> None:
        """Refuse what takes so many more bytes, unless there is room.

        Raises:
            OverloadedError: there is none.
        """
        used_bytes = self.used_bytes
        if used_bytes + nbytes > self.limit_bytes:
            raise OverloadedError(
                f"this peer's {len(self._calls)} calls, their arguments, its"
                " references, autograd contexts and optimizers, and the"
                f" {self.kept_bytes} bytes of answers that it has not taken hold"
                f" {used_bytes} bytes of this worker, and {nbytes} more are"
                f" needed; the limit is {self.limit_bytes}"
                " (LimitOptions.peer_bytes_max); send less at a time, and large data"
                " as tensors, arrays or bytes",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._admission.held_bytes + nbytes > PEERS * self.limit_bytes:
            raise OverloadedError(
                f"the peers of this worker hold {self._admission.held_bytes} bytes of"
                f" it; the limit is {PEERS} times LimitOptions.peer_bytes_max",
                retry_after_s=RETRY_AFTER_S,
            )

    def weigh(self, size_bytes: int, head: bytes, buffers: list[memoryview]) -> int:
        """Return the most that a message may hold without credit.

        Args:
            size_bytes: of its control part.
            head: that is kept with it.
            buffers: its payload.

        Returns:
            The bytes; `COUNTED` if they are to be counted as it is decoded.

        Raises:
            OverloadedError: the peer holds too much already.
        """
        self.check()
        if size_bytes > FREE_BYTES_MAX or self.is_half_full:
            return COUNTED
        return BYTE_BYTES_MAX * (size_bytes + len(head)) + _free_bytes(buffers)

    def counted(
        self, values: int, size_bytes: int, head: bytes, buffers: list[memoryview]
    ) -> int:
        """Return what a message holds without credit that has so many values."""
        nbytes = min(VALUE_BYTES * values, BYTE_BYTES_MAX * size_bytes)
        nbytes += _free_bytes(buffers)
        if len(head) > COUNTED_HEAD_BYTES_MAX:
            nbytes += BYTE_BYTES_MAX * len(head)
        elif head:
            nbytes += VALUE_BYTES * values_in(memoryview(head), len(head) * CONTAINER)
        if size_bytes <= FREE_BYTES_MAX:
            nbytes += TEXT_BYTE_BYTES * size_bytes
        return nbytes

    def take(self, nbytes: int) -> None:
        """Count so many more bytes; a negative number gives bytes back."""
        self.held_bytes += nbytes
        self._admission.held_bytes += nbytes
        self.is_watched = self._is_pressed or self.held_bytes > WATCHED_BYTES_MIN

    def on_kept(self, kept_bytes: int, *, is_pressed: bool) -> None:
        """Note how much the peer has not taken of its answers."""
        self.kept_bytes = kept_bytes
        self._is_pressed = is_pressed
        self.take(0)


def _free_bytes(buffers: list[memoryview]) -> int:
    """Return the bytes of a payload that needs no credit."""
    nbytes = sum(buffer.nbytes for buffer in buffers) if buffers else 0
    return nbytes if nbytes <= FREE_BYTES_MAX else 0
