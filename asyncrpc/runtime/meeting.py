"""The part of a `Worker` that meets others: they wait for each other and swap payloads.

Barriers are for all of the group; a rendezvous is for whom its callers name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrpc.arguments import check_kind, check_seconds
from asyncrpc.runtime.closing import Closing

if TYPE_CHECKING:
    from asyncrpc.runtime.membership.meetings import MeetingService


class Meeting(Closing):
    """The part of a `Worker` that meets others."""

    meetings: MeetingService

    async def rendezvous(
        self,
        tag: str,
        payload: bytes = b"",
        replicas: Sequence[int] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  (as `barrier`)
    ) -> list[bytes]:
        """Wait until all members have come here, and return the payloads of all.

        Payloads go up a binary tree of the members, then all of them go down it: of n
        members none is more than log2(n) steps from its root, and each speaks to three
        others at most.  No device, no graph and no store takes part.

        The n-th call of a member with a tag and replicas is the n-th of the others with
        the same; calls with another tag, or with other replicas, do not wait for each
        other.  Calls of one worker with the same ones take turns.  Members that use one
        tag with several replicas have to come to them in the same order.

        If one fails, it does so for everyone who has not passed it yet, at once; those
        who come to it later are told, too.  Then the next one can be used, by all who
        live.

        Args:
            tag: what it is for; at most 1,024 characters.
            payload: what this worker brings: at most 1 MiB, and 16 MiB divided by the
                number of members if that is less.
            replicas: ranks of the members; None: every rank of the group.  All members
                pass the same ones in the same order.
            timeout: seconds to wait; None: no limit.

        Returns:
            The payload of each member, in the order of `replicas`, or of their ranks.

        Raises:
            UsageError: an argument is of another kind; the group has no ranks; one of
                `replicas` is none of them, or in it twice; this worker is not in it.
                Then it has not come.  Or the payload is too long: that fails it for
                all.
            BarrierTimeoutError: `timeout` passed here; `missing` names who did not
                come.  It is a TimeoutError.
            BarrierBrokenError: another member gave it up; or two members wait for each
                other in two rendezvous, because one passed other replicas.
            WorkerLostError: a member is gone; `to` names it.
            NotStartedError: this worker does not run.

        Cancellation:
            The others are told, and their rendezvous fails too, unless it has been
            passed already.

        Example:
            >>> names = await worker.rendezvous("saved", worker.name.encode())

        Source: torch_xla's `xm.rendezvous`.  There all replicas have to take part, and
        payloads become part of the graph; before, they went through one server.
        """
        self.check_on_loop("Worker.rendezvous")
        check_kind("tag", tag, str, "a string")
        check_kind("payload", payload, bytes, "bytes")
        if replicas is not None:
            check_kind("replicas", replicas, Sequence, "ranks in a list, or None")
        if timeout is not None:
            check_seconds("timeout", timeout, at_least=0)
        return await self.meetings.meet(tag, payload, replicas, timeout)
