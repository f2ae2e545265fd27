"""A response lands in the memory that its caller has claimed for it, if it fits."""

from __future__ import annotations

import pytest

from asyncrpc.core.payloads.incoming import IncomingPayloads
from asyncrpc.core.payloads.receive_pool import fresh
from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.core.wire.limits import MessageLimits


class Nobody:
    def on_message(self, *_message: object) -> None:
        raise AssertionError

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        raise AssertionError


def incoming_with(nbytes: int) -> tuple[IncomingPayloads, memoryview]:
    incoming = IncomingPayloads(Nobody(), MessageLimits(), fresh)
    claimed = memoryview(bytearray(nbytes))
    incoming.claim(7, claimed)
    return incoming, claimed


class TestClaims:
    def test_the_only_buffer_of_the_response_lands_there(self) -> None:
        incoming, claimed = incoming_with(10)
        assert incoming.allocate(FrameKind.RESPONSE, 7, (10,))[0] is claimed

    @pytest.mark.parametrize(
        ("kind", "call_id", "lengths"),
        [
            (FrameKind.RESPONSE, 8, (10,)),
            (FrameKind.REQUEST, 7, (10,)),
            (FrameKind.ERROR, 7, (10,)),
            (FrameKind.RESPONSE, 7, (9,)),
            (FrameKind.RESPONSE, 7, (11,)),
            (FrameKind.RESPONSE, 7, (5, 5)),
            (FrameKind.RESPONSE, 7, (10, 0)),
        ],
    )
    def test_nothing_else_does(
        self, kind: int, call_id: int, lengths: tuple[int, ...]
    ) -> None:
        incoming, claimed = incoming_with(10)
        found = incoming.allocate(kind, call_id, lengths)
        assert [one.nbytes for one in found] == list(lengths)
        assert all(one is not claimed for one in found)

    def test_a_claim_that_has_been_released_is_no_more(self) -> None:
        incoming, claimed = incoming_with(10)
        incoming.release_claim(7)
        assert incoming.allocate(FrameKind.RESPONSE, 7, (10,))[0] is not claimed
