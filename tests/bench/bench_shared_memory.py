"""What does it cost to bring a payload to another process of this host?

Three ways, each as fast as it goes, all memory touched before: a copy into a slab that
the other process has mapped (`core.shm`); `process_vm_readv` into a buffer of its own;
a Unix socket into one.  And what a slab costs before it can be used.

    $ make bench ONLY=shared_memory
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from asyncrpc.core.loop.clock import now_s
from asyncrpc.core.serde.encoded import view_memory
from asyncrpc.core.shm.slab import Slab

SIZES_BYTES: Final = [
    *(64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 1 << 28),
]
REPEATS_MAX: Final = 200
BYTES_PER_CELL: Final = 4 << 30
SOCKET_BUFFER_BYTES: Final = 8 << 20

# The other process: warm memory to be read from, and a socket that it writes on demand.
SENDER: Final = """
import socket, sys, torch
size, sock = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
tensor = torch.ones(size, dtype=torch.uint8)
view = memoryview(tensor.numpy())
sock.sendall(tensor.data_ptr().to_bytes(8, "little"))
while wanted := sock.recv(8):
    sock.sendall(view[: int.from_bytes(wanted, "little")])
"""


class _Extent(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def median_of(action: Callable[[], object], nbytes: int) -> float:
    """Return the median seconds of an action."""
    repeats = max(5, min(REPEATS_MAX, BYTES_PER_CELL // nbytes))
    times_s = []
    for _ in range(repeats):
        start_s = now_s()
        action()
        times_s.append(now_s() - start_s)
    times_s.sort()
    return times_s[len(times_s) // 2]


@contextmanager
def sender(nbytes: int) -> Iterator[tuple[int, int, socket.socket]]:
    """Start the other process; give its id, where its memory is, and a socket to it."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    command = [sys.executable, "-c", SENDER, str(nbytes), str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        address = int.from_bytes(ours.recv(8, socket.MSG_WAITALL), "little")
        yield process.pid, address, ours
        ours.shutdown(socket.SHUT_RDWR)


def receive(sock: socket.socket, into: memoryview) -> None:
    sock.sendall(into.nbytes.to_bytes(8, "little"))
    while into:
        into = into[sock.recv_into(into) :]


def pull(pid: int, address: int, into: memoryview) -> None:
    target = ctypes.addressof(ctypes.c_ubyte.from_buffer(into))
    done, nbytes = 0, into.nbytes
    while done < nbytes:
        local = _Extent(target + done, nbytes - done)
        remote = _Extent(address + done, nbytes - done)
        taken = _READV(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if taken <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += taken


def row(nbytes: int) -> list[str]:
    """Measure one size on every way, in GB/s."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    mine = view_memory(source, source.data_ptr(), nbytes)
    start_s = now_s()
    slab = Slab.create(nbytes).prefault()
    made_s = now_s() - start_s
    start_s = now_s()
    attached = Slab.attach(os.dup(slab.descriptor), nbytes).prefault()
    attached_s = now_s() - start_s
    target = slab.view(slab, 0, nbytes)
    copy_s = median_of(lambda: target.__setitem__(slice(None), mine), nbytes)
    theirs = torch.frombuffer(attached.view(attached, 0, nbytes), dtype=torch.uint8)
    whole = theirs.view(torch.float32)
    read_s = median_of(whole.sum, nbytes)
    with sender(nbytes) as (pid, address, sock):
        try:
            pull(pid, address, mine)
            pull_s = median_of(lambda: pull(pid, address, mine), nbytes)
        except PermissionError:
            pull_s = float("inf")
        socket_s = median_of(lambda: receive(sock, mine), nbytes)
    rates = [nbytes / took_s / 1e9 for took_s in (copy_s, pull_s, socket_s, read_s)]
    return [*(f"{rate:.1f}" for rate in rates), f"{made_s * 1e3:.1f}",
            f"{attached_s * 1e3:.2f}"]  # fmt: skip


def main() -> None:
    heads = ["KiB", "slab", "readv", "socket", "(sum)", "make, ms", "attach, ms"]
    print("GB/s; what it takes to make and to attach a slab of the size, ms")
    print("".join(f"{head:>12}" for head in heads))
    for nbytes in SIZES_BYTES:
        cells = [f"{nbytes >> 10:,}", *row(nbytes)]
        print("".join(f"{cell:>12}" for cell in cells), flush=True)


_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_READV: Final = _LIBC.process_vm_readv
_WORD: Final = ctypes.c_ulong
_READV.argtypes = [ctypes.c_int, ctypes.c_void_p, _WORD, ctypes.c_void_p, _WORD, _WORD]
_READV.restype = ctypes.c_ssize_t


if __name__ == "__main__":
    main()
