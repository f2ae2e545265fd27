"""Counters: what has happened to a worker since it was made, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What one worker has counted; `Worker.counters`.

    The numbers only grow.  None is touched on the way of a call.

    Attributes:
        authentications_failed: connections, dialed or accepted, whose two ends could
            not prove to each other that they belong together: other secrets,
            certificates that were refused, another user of the host.
        handshakes_refused: accepted connections that did not speak this protocol, or
            another version of it.
        connections_dropped_unauthenticated: accepted connections that were ended before
            they had proved anything: too slow, or too many at once.
        connections_resumed: connections, also lanes, that broke and went on over
            another transport.
        code_sent: functions and classes that were sent to a peer by value.
        code_received: functions and classes that a peer has sent by value.
        workers_lost: peers that were given up: dead, or out of reach for too long, or
            gone in order.
    """

    authentications_failed: int = 0
    handshakes_refused: int = 0
    connections_dropped_unauthenticated: int = 0
    connections_resumed: int = 0
    code_sent: int = 0
    code_received: int = 0
    workers_lost: int = 0
