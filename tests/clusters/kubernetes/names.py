"""A name server for pods: one file of records, read anew for each question.

It answers as CoreDNS does for a cluster: a name without a record does not exist.  It
prints each question, so that a test can wait for it.  Run it with the address to listen
at and the file, whose lines are `name address`.

Source: RFC 1035, section 4.
"""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path
from typing import Final

_PORT: Final = 53
_A: Final = 1
_RECURSION: Final = 0x0180
_RESPONSE: Final = 0x8000
_NO_SUCH_NAME: Final = 3
_TTL_S: Final = 1


def records(path: Path) -> dict[str, list[str]]:
    """Return the addresses of each name."""
    addresses: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, address = line.split()
        addresses.setdefault(name, []).append(address)
    return addresses


def question(packet: bytes) -> tuple[str, int, int]:
    """Return the name and the type that a packet asks for, and where that ends."""
    labels, at = [], 12
    while length := packet[at]:
        labels.append(packet[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    kind: int = struct.unpack_from("!H", packet, at + 1)[0]
    return ".".join(labels).lower(), kind, at + 5


def answer(packet: bytes, known: dict[str, list[str]]) -> bytes:
    name, kind, end = question(packet)
    addresses = known.get(name, []) if kind == _A else []
    code = 0 if name in known else _NO_SUCH_NAME
    flags = _RESPONSE | _RECURSION | code
    head = packet[:2] + struct.pack("!5H", flags, 1, len(addresses), 0, 0)
    # 0xC00C points at the name in the question.
    body = b"".join(
        struct.pack("!HHHIH", 0xC00C, _A, 1, _TTL_S, 4) + socket.inet_aton(address)
        for address in addresses
    )
    return head + packet[12:end] + body


def main(address: str, file: str) -> None:
    """Answer for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, _PORT))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            packet, client = server.recvfrom(512)
            name, kind, _ = question(packet)
            known = records(Path(file))
            server.sendto(answer(packet, known), client)
            if kind == _A:
                listed = " ".join(known.get(name, ["nothing"]))
                sys.stdout.write(f"asked {name}: {listed}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
