"""Messages on their way."""

from __future__ import annotations

from typing import Final

from asyncrpc.core.wire import outgoing
from tests.property.machines.spec import Machine, guards

OUTGOING: Final = Machine(
    name="A large message on its way out",
    about="The states of a message that is not written at once. It can be given up in "
    "each state in which it waits.",
    source=outgoing,
    states="OutgoingState",
    starts=("NEW",),
    begin=lambda build, _: build.OutgoingMessage(2, 1),
    stories="""
it goes in chunks: NEW -QUEUE-> QUEUED -SEND-> SENT
it waits for the first lane: NEW -AWAIT_LANE-> NO_LANE -QUEUE-> QUEUED
it goes through shared memory: NEW -COPY-> COPYING -SEND-> SENT
it is copied at once, or needs no chunks: NEW -SEND-> SENT
the connection has ended before: NEW -DROP-> DROPPED
it waits for credit, and then for lanes:
    NEW -AWAIT_CREDIT-> NO_CREDIT -AWAIT_LANE-> NO_LANE -DROP-> DROPPED
it waits for credit, and then for memory:
    NO_CREDIT -BLOCK-> BLOCKED -COPY-> COPYING -DROP-> DROPPED
it waits for credit alone: NO_CREDIT -SEND-> SENT
it waits for credit, and is copied: NO_CREDIT -COPY-> COPYING
it waits for credit, and then for its turn: NO_CREDIT -QUEUE-> QUEUED -DROP-> DROPPED
the credit does not come: NO_CREDIT -DROP-> DROPPED
its bytes come from a device: NEW -BLOCK-> BLOCKED -SEND-> SENT
its bytes come, and lanes do not: BLOCKED -AWAIT_LANE-> NO_LANE
its bytes come, and lanes are there: BLOCKED -QUEUE-> QUEUED
its bytes do not come: BLOCKED -DROP-> DROPPED
""",
    tests=("tests/unit/core/wire/test_outgoing.py",),
    guards=guards("""
dropped-messages-are-not-taken-back: self._waiting[message]() =>
a-message-keeps-its-buffers: message.buffers = ()  # which may refer to the message =>
messages-of-other-calls-are-dropped: and message.call_id == call_id =>
messages-with-more-than-a-value-are-dropped: and (message.is_bare or not bare_only) =>
ended-messages-still-wait:
    self._waiting.pop(message, None) is not None => message in self._waiting
"""),
)
