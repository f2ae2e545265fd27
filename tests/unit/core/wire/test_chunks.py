"""Every byte of a payload lands once, in its place, whichever lane brings it when."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrpc.core.wire import chunks as module
from asyncrpc.core.wire import reader as reader_module
from asyncrpc.core.wire.chunks import ChunkScheduler, LaneReader, OutgoingTransfer
from asyncrpc.core.wire.frames import (
    HEADER,
    HEADER_BYTES,
    VERSION,
    Flags,
    FrameKind,
    data_prefix,
    prefix,
)
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.core.wire.outgoing import OutgoingEvent, OutgoingMessage, OutgoingMessages
from asyncrpc.core.wire.reader import FrameReader
from asyncrpc.errors import FrameTooLargeError, MalformedError
from tests.unit.core.wire.recorder import Recorder, feed

REQUEST, RESPONSE, ITEM = FrameKind.REQUEST, FrameKind.RESPONSE, FrameKind.STREAM_ITEM
CHUNK = 10


@pytest.fixture(autouse=True)
def small_limits() -> Iterator[None]:
    """Let three chunks be thirty bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", CHUNK)
        patch.setattr(module, "READ_BYTES_MAX", 7)
        patch.setattr(module, "_SCRATCH_BYTES", 3)
        patch.setattr(reader_module, "INLINE_BYTES_MAX", 8)
        yield


def views(*texts: bytes) -> list[memoryview]:
    return [memoryview(text) for text in texts]


def message(kind: int, call_id: int, *texts: bytes) -> OutgoingMessage:
    return OutgoingMessage(kind, call_id, buffers=views(*texts))


def scheduler() -> ChunkScheduler:
    return ChunkScheduler(lambda _: None)


def add(chunks: ChunkScheduler, outgoing: OutgoingMessage) -> bytes:
    """Queue a payload for lanes; return its message."""
    return chunks.add(outgoing, over_lanes=True)[1]


def joined(parts: Sequence[bytes | memoryview]) -> bytes:
    return b"".join(parts)


class Receiver(Recorder):
    """A frame reader, and lanes that share its arrivals."""

    def __init__(self, lanes: int = 1, limits: MessageLimits | None = None) -> None:
        super().__init__()
        self.control: FrameReader = self.reader(limits)
        self.arrivals = self.control.arrivals
        self.lanes = [LaneReader(self.arrivals) for _ in range(lanes)]

    @property
    def payloads(self) -> list[bytes]:
        return [b"".join(message.buffers) for message in self.messages]

    def open(self, *texts: bytes, kind: int = REQUEST, call_id: int = 1) -> None:
        feed(self.control, add(scheduler(), message(kind, call_id, *texts)))

    def on_lane(
        self, stream: bytes, lane: int = 0, at_most: Sequence[int] = ()
    ) -> None:
        feed(self.lanes[lane], stream, at_most)


def chunk(offset: int, data: bytes, serial: int = 1) -> bytes:
    return data_prefix(serial, offset, len(data)) + data


class TestScheduling:
    @pytest.mark.parametrize("over_lanes", [True, False])
    def test_opening_frame_announces_where_its_payload_comes(
        self, *, over_lanes: bool
    ) -> None:
        outgoing = OutgoingMessage(
            REQUEST,
            5,
            flags=Flags.STREAM,
            aux=9,
            head=b"h",
            control=b"c",
            buffers=views(b"x" * 12, b"", b"y"),
        )
        _, opening = scheduler().add(outgoing, over_lanes=over_lanes)
        assert opening == prefix(
            REQUEST,
            5,
            flags=Flags.STREAM | Flags.DEFERRED | (Flags.LANES if over_lanes else 0),
            aux=9,
            head=b"h",
            control=b"c",
            lengths=(12, 0, 1),
            payload_bytes=13,
        )

    def test_chunks_are_cut_without_a_copy_across_buffers(self) -> None:
        source = bytes(range(25))
        parts = source[:4], source[4:]
        chunks = scheduler()
        add(chunks, message(REQUEST, 3, parts[0], b"", parts[1]))
        first, second, third = (chunks.next_chunk() for _ in range(3))
        assert first[0] == data_prefix(1, 0, 10)
        assert [piece.obj for piece in first[1:] if isinstance(piece, memoryview)] == [
            *parts
        ]
        assert joined(first[1:]) == source[:10]
        assert joined(second) == data_prefix(1, 10, 10) + source[10:20]
        assert joined(third) == data_prefix(1, 20, 5) + source[20:]
        assert not chunks

    def test_transfers_take_turns_and_have_their_own_serials(self) -> None:
        chunks = scheduler()
        for _ in range(3):  # of one call: the serials tell them apart
            add(chunks, message(ITEM, 7, bytes(20)))
        turns = []
        while chunks:
            header = HEADER.unpack(chunks.next_chunk()[0])
            turns.append((header[8], header[7]))
        assert turns == [(1, 0), (2, 0), (3, 0), (1, 10), (2, 10), (3, 10)]

    def test_message_is_sent_with_its_last_chunk(self) -> None:
        sent: list[OutgoingMessage] = []
        chunks = ChunkScheduler(sent.append)
        outgoing = message(REQUEST, 1, bytes(11))
        add(chunks, outgoing)
        chunks.next_chunk()
        assert not sent
        chunks.next_chunk()
        assert sent == [outgoing]

    def test_drop_reports_the_bytes_already_sent(self) -> None:
        chunks = scheduler()
        add(chunks, message(REQUEST, 1, bytes(30)))
        second, _ = chunks.add(message(REQUEST, 2, bytes(30)), over_lanes=True)
        for _ in range(4):
            chunks.next_chunk()
        assert chunks.remove(second) == prefix(FrameKind.DROP, 2, aux=20)
        assert HEADER.unpack(chunks.next_chunk()[0])[8] == 1
        assert not chunks

    def test_clear_returns_the_messages_under_way(self) -> None:
        chunks = scheduler()
        both = [message(REQUEST, number, bytes(30)) for number in (1, 2)]
        for outgoing in both:
            add(chunks, outgoing)
        assert chunks.clear() == both
        assert not chunks


class TestArriving:
    @pytest.mark.parametrize("at_most", [(), (1,), (3, 5, 1), (41, 2)])
    def test_lane_stream_may_be_cut_anywhere(self, at_most: Sequence[int]) -> None:
        source = bytes(range(33))
        receiver = Receiver()
        receiver.open(source[:13], b"", source[13:])
        stream = b"".join(
            chunk(at, source[at : at + CHUNK]) for at in range(0, 33, CHUNK)
        )
        receiver.on_lane(stream, at_most=at_most)
        (message,) = receiver.messages
        assert message.buffers == (source[:13], b"", source[13:])
        assert not len(receiver.arrivals)
        assert receiver.lanes[0].is_between_chunks

    def test_message_arrives_with_the_last_byte_of_any_chunk(self) -> None:
        receiver = Receiver(lanes=2)
        receiver.open(bytes(range(25)))
        receiver.on_lane(chunk(20, bytes(range(20, 25))))
        receiver.on_lane(chunk(0, bytes(range(10))), lane=1)
        last = chunk(10, bytes(range(10, 20)))
        receiver.on_lane(last[:-1])
        assert not receiver.messages
        receiver.on_lane(last[-1:])
        assert receiver.payloads == [bytes(range(25))]

    def test_two_lanes_may_be_inside_chunks_of_one_payload(self) -> None:
        receiver = Receiver(lanes=2)
        receiver.open(bytes(20))
        first, other = chunk(0, b"a" * 10), chunk(10, b"b" * 10)
        receiver.on_lane(first[:45], lane=0)
        receiver.on_lane(other[:42], lane=1)
        receiver.on_lane(first[45:], lane=0)
        receiver.on_lane(other[42:], lane=1)
        assert receiver.payloads == [b"a" * 10 + b"b" * 10]

    def test_chunk_bytes_land_directly_in_their_buffer(self) -> None:
        receiver = Receiver()
        receiver.open(bytes(20))
        lane = receiver.lanes[0]
        assert lane.get_buffer().nbytes == HEADER_BYTES
        receiver.on_lane(data_prefix(1, 10, 10))
        assert lane.get_buffer().nbytes == 7  # READ_BYTES_MAX
        lane.get_buffer()[:] = b"1234567"
        lane.advance(7)
        assert lane.get_buffer().nbytes == 3
        assert lane.bytes_copied == receiver.control.bytes_copied == 0

    def test_lane_ahead_of_the_message_waits(self) -> None:
        receiver = Receiver()
        lane = receiver.lanes[0]
        receiver.open(bytes(9))
        receiver.on_lane(data_prefix(3, 0, 9))
        assert lane.waits_for == 3
        assert not lane.is_between_chunks
        receiver.open(bytes(9))
        assert not lane.proceed()
        receiver.open(b"x" * 9)
        assert lane.proceed()
        assert not lane.waits_for
        receiver.on_lane(b"y" * 9)
        assert receiver.payloads == [b"y" * 9]

    @pytest.mark.parametrize("is_ahead", [False, True])
    def test_lane_waits_for_memory_of_every_buffer_of_a_chunk(
        self, *, is_ahead: bool
    ) -> None:
        asked: list[int] = []
        ready: set[int] = set()

        def is_ready(memory: memoryview) -> bool:
            asked.append(memory.nbytes)
            return memory.nbytes in ready

        receiver = Receiver()
        receiver.arrivals.is_ready = is_ready
        lane = receiver.lanes[0]
        if is_ahead:
            receiver.on_lane(data_prefix(1, 0, 9))
            receiver.open(bytes(4), b"", bytes(5))
            assert not lane.proceed()
        else:
            receiver.open(bytes(4), b"", bytes(5))
            receiver.on_lane(data_prefix(1, 0, 9))
        assert lane.is_waiting
        assert not lane.is_between_chunks
        ready.add(4)
        assert not lane.proceed()
        ready.add(5)
        assert lane.proceed()
        assert not lane.is_waiting
        assert asked == [4, 4, 5, 4, 5]
        receiver.on_lane(b"123456789")
        assert receiver.payloads == [b"123456789"]

    def test_unwanted_payload_needs_no_memory(self) -> None:
        receiver = Receiver()
        receiver.arrivals.is_ready = lambda _: False
        lane = receiver.lanes[0]
        receiver.open(bytes(9))
        receiver.on_lane(data_prefix(1, 0, 9))
        assert lane.is_waiting
        receiver.arrivals.forget(REQUEST, 1)
        assert lane.proceed()
        receiver.on_lane(b"y" * 9)
        assert receiver.payloads == []
        assert not len(receiver.arrivals)

    def test_waiting_lane_is_notified_of_each_message(self) -> None:
        opened: list[int] = []
        receiver = Receiver()
        receiver.arrivals.on_opened = lambda: opened.append(receiver.arrivals.opened)
        receiver.open(bytes(9))
        receiver.open(bytes(9))
        assert opened == [1, 2]

    def test_chunks_of_a_payload_may_come_over_lane_and_connection(self) -> None:
        receiver = Receiver()
        _, opening = scheduler().add(message(REQUEST, 1, bytes(25)), over_lanes=False)
        feed(receiver.control, opening)
        receiver.on_lane(chunk(20, b"c" * 5))
        feed(receiver.control, chunk(0, b"a" * 10))
        receiver.on_lane(chunk(10, b"b" * 10))
        assert receiver.payloads == [b"a" * 10 + b"b" * 10 + b"c" * 5]
        assert receiver.control.bytes_copied == 0

    def test_completion_is_reported_before_each_delivery(self) -> None:
        """An ACK that came after it would not go with what answers at once."""
        delivered: list[int] = []
        receiver = Receiver()
        receiver.arrivals.on_complete = lambda: delivered.append(len(receiver.messages))
        receiver.open(bytes(9))
        receiver.on_lane(chunk(0, bytes(9)))
        assert delivered == [0]
        assert receiver.payloads == [bytes(9)]

    def test_small_messages_are_read_in_bulk_during_a_transfer(self) -> None:
        """Only payloads on the connection itself make its reader take single frames."""
        receiver = Receiver()
        receiver.open(bytes(9))
        assert receiver.control.get_buffer().nbytes > HEADER_BYTES

    def test_rest_of_a_payload_can_be_moved_to_other_memory(self) -> None:
        receiver = Receiver()
        receiver.open(bytes(20))
        before = receiver.buffers[0]
        receiver.on_lane(chunk(0, b"a" * 10)[:-4])
        receiver.arrivals.move(REQUEST, 1, lambda nbytes: memoryview(bytearray(nbytes)))
        receiver.on_lane(chunk(0, b"a" * 10)[-4:])
        receiver.on_lane(chunk(10, b"b" * 10))
        assert before == b"a" * 6 + b"\xaa" * 14
        assert receiver.payloads == [bytes(6) + b"a" * 4 + b"b" * 10]


class TestGivingUp:
    def test_dropped_transfer_is_discarded_then_forgotten(self) -> None:
        receiver = Receiver()
        receiver.open(bytes(30), call_id=4)
        receiver.on_lane(chunk(0, b"a" * 10)[:-3])
        assert receiver.arrivals.drop(1, 20) == (REQUEST, 4)
        receiver.on_lane(b"aaa")
        assert len(receiver.arrivals) == 1
        receiver.on_lane(chunk(20, b"c" * 10))
        assert not len(receiver.arrivals)
        assert receiver.messages == []
        assert receiver.lanes[0].is_between_chunks

    def test_dropped_transfer_releases_its_memory_at_once(self) -> None:
        receiver = Receiver()
        receiver.open(bytes(30))
        memory = receiver.buffers[0]
        receiver.on_lane(chunk(0, b"a" * 10)[:-8])
        receiver.arrivals.drop(1, 10)
        assert receiver.lanes[0].get_buffer().nbytes == 3  # the scratch buffer
        receiver.on_lane(b"a" * 8)
        assert memory == b"aa" + b"\xaa" * 28

    def test_scratch_buffer_takes_no_more_than_the_chunk(self) -> None:
        receiver = Receiver()
        receiver.open(bytes(20))
        receiver.on_lane(chunk(0, b"a" * 10)[:-2])
        receiver.arrivals.drop(1, 10)
        assert receiver.lanes[0].get_buffer().nbytes == 2

    def test_complete_or_unbegun_drop_leaves_nothing(self) -> None:
        receiver = Receiver()
        receiver.open(bytes(20))
        receiver.open(bytes(20))
        receiver.on_lane(chunk(0, b"a" * 10))
        assert receiver.arrivals.drop(1, 10)
        assert receiver.arrivals.drop(2, 0)
        assert not len(receiver.arrivals)

    def test_transfer_dropped_before_a_waiting_lane_is_discarded(self) -> None:
        receiver = Receiver()
        receiver.on_lane(data_prefix(1, 0, 10))
        receiver.open(bytes(20))
        receiver.arrivals.drop(1, 10)
        assert receiver.lanes[0].proceed()
        receiver.on_lane(b"a" * 10)
        assert not len(receiver.arrivals)
        assert receiver.messages == []

    def test_unwanted_payload_still_arrives(self) -> None:
        receiver = Receiver()
        receiver.open(bytes(20), call_id=6)
        assert receiver.arrivals.forget(REQUEST, 7) is None
        assert receiver.arrivals.forget(RESPONSE, 6) is None
        assert receiver.arrivals.forget(REQUEST, 6) is not None
        assert receiver.arrivals.forget(REQUEST, 6) is None
        receiver.on_lane(chunk(0, bytes(10)))
        assert len(receiver.arrivals) == 1
        receiver.on_lane(chunk(10, bytes(10)))
        assert not len(receiver.arrivals)
        assert receiver.messages == []

    def test_transfer_may_be_dropped_by_both_sides(self) -> None:
        receiver = Receiver()
        receiver.open(bytes(20))
        receiver.arrivals.forget(REQUEST, 1)
        assert receiver.arrivals.drop(1, 0) is None
        assert not len(receiver.arrivals)


class TestRefusals:
    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [
            (5, 10),  # not at a multiple
            (0, 9),  # short, and not the last
            (20, 10),  # the last, and too long
            (30, 10),  # behind the end
            (30, 0),
            (0, 0),
            (-10, 10),
            (0, 25),
        ],
    )
    def test_malformed_chunk_is_refused(self, offset: int, nbytes: int) -> None:
        receiver = Receiver()
        receiver.open(bytes(25))
        with pytest.raises(MalformedError, match="are not a chunk of 25"):
            receiver.on_lane(data_prefix(1, offset, nbytes))

    def test_repeated_chunk_is_refused(self) -> None:
        receiver = Receiver(lanes=2)
        receiver.open(bytes(100))
        receiver.on_lane(data_prefix(1, 90, 10))
        receiver.on_lane(chunk(10, bytes(10)), lane=1)
        with pytest.raises(MalformedError, match=r"chunk at 90 .* twice"):
            receiver.on_lane(data_prefix(1, 90, 10), lane=1)

    def test_bytes_for_an_ended_transfer_are_refused(self) -> None:
        receiver = Receiver()
        receiver.open(bytes(9))
        receiver.on_lane(chunk(0, bytes(9)))
        with pytest.raises(
            MalformedError, match="came for transfer 1, which expects none"
        ):
            receiver.on_lane(data_prefix(1, 0, 9))

    def test_excess_bytes_of_a_dropped_transfer_are_refused(self) -> None:
        receiver = Receiver()
        receiver.open(bytes(40))
        receiver.arrivals.drop(1, 10)
        with pytest.raises(MalformedError, match="expects none"):
            receiver.on_lane(data_prefix(1, 0, 20))
        receiver.lanes.append(LaneReader(receiver.arrivals))
        receiver.on_lane(data_prefix(1, 0, 10), lane=1)
        with pytest.raises(MalformedError, match="expects none"):
            receiver.on_lane(data_prefix(1, 10, 10), lane=0)

    @pytest.mark.parametrize("sent", [9, 25, 30, -1])
    def test_impossible_drop_is_refused(self, sent: int) -> None:
        receiver = Receiver()
        receiver.open(bytes(25))
        receiver.on_lane(data_prefix(1, 0, 10))
        with pytest.raises(MalformedError, match=f"given up after {sent}"):
            receiver.arrivals.drop(1, sent)

    def test_drop_of_an_unknown_transfer_is_refused(self) -> None:
        receiver = Receiver()
        for _ in range(2):
            with pytest.raises(MalformedError, match="not under way"):
                receiver.arrivals.drop(1, 0)
        receiver.open(bytes(40))
        receiver.arrivals.drop(1, 20)
        with pytest.raises(MalformedError, match="not under way"):
            receiver.arrivals.drop(1, 20)

    @pytest.mark.parametrize(
        "frame",
        [
            b"X" + chunk(0, bytes(9))[1:],
            chunk(0, bytes(9))[:2] + b"\x01" + chunk(0, bytes(9))[3:],
            prefix(FrameKind.PING, 1),
            HEADER.pack(b"AR", VERSION, FrameKind.DATA, 0, 1, 0, 0, 0, 1, 9),
            HEADER.pack(b"AR", VERSION, FrameKind.DATA, 0, 0, 1, 0, 0, 1, 9),
            HEADER.pack(b"AR", VERSION, FrameKind.DATA, 0, 0, 0, 1, 0, 1, 9),
            data_prefix(0, 0, 9),
        ],
    )
    def test_malformed_data_frame_is_refused(self, frame: bytes) -> None:
        receiver = Receiver()
        receiver.open(bytes(9))
        with pytest.raises(MalformedError, match="DATA"):
            receiver.on_lane(frame[:HEADER_BYTES])

    def test_too_many_transfers_are_refused(self) -> None:
        receiver = Receiver(limits=MessageLimits(transfers_max=2))
        receiver.open(bytes(9))
        receiver.open(bytes(9))
        with pytest.raises(FrameTooLargeError, match="more than 2 transfers"):
            receiver.open(bytes(9))


@settings(deadline=None, max_examples=150)
@given(
    sizes=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), max_size=6),
    lanes=st.integers(1, 3),
    lane_0=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_every_order_over_any_lanes_gives_the_same_messages(
    sizes: list[list[int]], lanes: int, seed: int, *, lane_0: bool
) -> None:
    """Chunks, messages, drops and reads interleave at random; order in a lane holds."""
    rng = random.Random(seed)
    outgoing = OutgoingMessages()
    chunks, receiver = ChunkScheduler(outgoing.sent), Receiver(lanes)
    control, streams = bytearray(), [bytearray() for _ in range(lanes)]
    expected: dict[int, tuple[bytes, ...]] = {}

    def take_back(transfer: OutgoingTransfer) -> None:
        control.extend(chunks.remove(transfer))

    for call_id, lengths in enumerate(sizes, 1):
        texts = [rng.randbytes(length) for length in lengths]
        if any(texts):
            expected[call_id] = tuple(texts)
            added = message(REQUEST, call_id, *texts)
            transfer, opening = chunks.add(added, over_lanes=not lane_0)
            outgoing.wait(added, OutgoingEvent.QUEUE, partial(take_back, transfer))
            control += opening
    dropped = set()
    while chunks:
        lane = rng.randrange(-int(lane_0), lanes)
        stream = streams[lane] if lane >= 0 else control
        stream += joined(chunks.next_chunk())
        victim = rng.choice(list(expected))
        if rng.random() < 0.1 and outgoing.drop(REQUEST, victim):
            dropped.add(victim)
    assert not len(outgoing)
    pending = [control, *streams]
    while any(pending):
        open_ = [
            at
            for at, stream in enumerate(pending)
            if stream and (not at or not receiver.lanes[at - 1].waits_for)
        ]
        at = rng.choice(open_)
        nbytes = rng.randint(1, len(pending[at]))
        if not at:
            feed(receiver.control, bytes(pending[0][:nbytes]))
            for reader in receiver.lanes:
                if reader.waits_for:
                    reader.proceed()
        else:
            nbytes = min(nbytes, receiver.lanes[at - 1].get_buffer().nbytes)
            receiver.on_lane(bytes(pending[at][:nbytes]), at - 1)
        del pending[at][:nbytes]
    got = {arrived.call_id: arrived.buffers for arrived in receiver.messages}
    assert got == {key: expected[key] for key in expected.keys() - dropped}
    assert not len(receiver.arrivals)
    assert lane_0 or receiver.control.bytes_copied == 0
