"""The messages by which new weights come to a replica."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from asyncrpc.extend import MEMBERS, Count, Request, message

SERVICE: Final = "weights"


class TensorHead(NamedTuple):
    """A tensor that is announced.

    Attributes:
        dtype: such as `float32`.
    """

    name: str
    shape: list[Count]
    dtype: str


class VersionReport(NamedTuple):
    """Which versions a replica has.

    Attributes:
        kept: earlier versions that it can return to, the latest last.
        canary: share of the calls that canaries get; 0: it is not a canary.
    """

    served: Count
    kept: list[Count]
    canary: float


@message(SERVICE, "versions", about="the model that the receiver serves", by=MEMBERS)
class AskVersions(Request[VersionReport]):
    """Ask which versions a replica has."""


@message(SERVICE, "begin", about="a transfer of the sender", by=MEMBERS)
class BeginTransfer(Request[None]):
    """Announce new weights.

    Attributes:
        serial: of the transfer, at its publisher.
        tensors: all of them.
    """

    serial: Count
    version: Count
    tensors: list[TensorHead]


@message(SERVICE, "put", about="a transfer of the sender", by=MEMBERS)
class PutTensors(Request[None]):
    """Send some of the tensors.

    Attributes:
        tensors: in the order of the names.
    """

    serial: Count
    names: list[str]
    tensors: list[torch.Tensor]


@message(SERVICE, "commit", about="a transfer of the sender", by=MEMBERS)
class CommitTransfer(Request[VersionReport]):
    """Serve the new weights from now on.

    Attributes:
        canary: share of the calls that canaries get; 0: these weights are for all.
    """

    serial: Count
    canary: float


@message(SERVICE, "abandon", about="a transfer of the sender", by=MEMBERS)
class AbandonTransfer(Request[None]):
    """Give up new weights."""

    serial: Count


@message(SERVICE, "canary", about="the model that the receiver serves", by=MEMBERS)
class SetCanary(Request[VersionReport]):
    """Set the share of the calls that canaries get.

    Attributes:
        version: the canaries' version; a replica that serves another changes nothing.
        share: of the calls; 0: the replicas are no longer canaries.
    """

    version: Count
    share: float


@message(SERVICE, "rollback", about="the model that the receiver serves", by=MEMBERS)
class RollBack(Request[VersionReport]):
    """Serve the previous version again.

    Attributes:
        version: to withdraw; a replica that serves another changes nothing.
    """

    version: Count


@message(SERVICE, "send", about="the model that the receiver serves", by=MEMBERS)
class SendWeights(Request[Count | None]):
    """Ask a replica to send the weights that it serves to the asking worker.

    The answer is their version; None: the asking worker needs no other.

    Attributes:
        known: the version that the asking worker serves.
    """

    known: Count
