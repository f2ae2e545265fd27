"""What a program sees of a worker: few names."""

from __future__ import annotations

from asyncrpc import LocalRendezvous, Worker

MEMBERS_MAX = 25


def members_of(worker: Worker) -> list[str]:
    """Return the public members of an object: some are no attributes of its class."""
    return [name for name in dir(worker) if not name.startswith("_")]


def test_worker_has_few_public_members() -> None:
    members = members_of(Worker("a", rendezvous=LocalRendezvous(1)))
    assert len(members) <= MEMBERS_MAX, members
