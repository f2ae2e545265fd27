"""Lossless compression of a buffer, in blocks, by optional packages.

A buffer is cut into blocks of 1 MiB.  Each is compressed by itself, or sent as it is if
that does not make it shorter; they follow each other.  So the size of a block is known
before it is decompressed, a buffer may be of any size (lz4 takes 2 GiB at most), and
neither end ever holds more than one block besides the buffers.

A message becomes at most `EXPANSION_MAX` times what arrives of it, and
`EXPANSION_FREE_BYTES`: a peer that sends little takes little.  So of what can be
compressed further, a sender leaves some blocks as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from asyncrpc.errors import DecodeError

BLOCK_BYTES: Final = 1 << 20
# Sparse gradients become 10 to 20 times as long; zeros alone would 1,000 times.
EXPANSION_MAX: Final = 16
EXPANSION_FREE_BYTES: Final = 1 << 20
# Shorter buffers gain less than a message costs anyway.
COMPRESS_BYTES_MIN: Final = 4 << 10
# A payload is sent compressed only if that saves a 16th of its bytes.
_SAVED_SHIFT: Final = 4
# Level 1 against 3, the package's default: on float32 numbers 1.5 times as fast for the
# same length; on text as fast, and 3 % longer.
_ZSTD_LEVEL: Final = 1

_MODULES: Final = {"lz4": "lz4.block", "zstd": "zstandard"}
_PACKAGES: Final = {"lz4": "lz4", "zstd": "zstandard"}
NAMES: Final = tuple(_MODULES)


def missing_package(name: str) -> str:
    """Return the package that a compressor lacks; empty if it is installed."""
    try:
        importlib.import_module(_MODULES[name])
    except ImportError:
        return _PACKAGES[name]
    return ""


def compress(
    name: str, data: memoryview, unpacked_bytes: int, free_bytes: int
) -> tuple[memoryview, list[int]] | None:
    """Return compressed blocks of `data` and their lengths; None if they save little.

    A block that is not shorter is sent uncompressed, at its full length.

    Args:
        free_bytes: by so many the blocks may become more than `EXPANSION_MAX` times
            as long; beyond that some of them are sent uncompressed.
    """
    if data.nbytes < COMPRESS_BYTES_MIN:
        return None
    compressed = _compressor(name)
    parts: list[bytes | memoryview] = []
    for block in _cut(data):
        short: bytes | memoryview = compressed(block)
        becomes = -(-len(block) * unpacked_bytes // data.nbytes)
        if len(short) >= len(block) or expansion(becomes, len(short)) > free_bytes:
            short = block
        parts.append(short)
        free_bytes -= expansion(becomes, len(short))
    lengths = [len(part) for part in parts]
    if sum(lengths) > data.nbytes - (data.nbytes >> _SAVED_SHIFT):
        return None
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts)), lengths


def expansion(unpacked_bytes: int, arrived_bytes: int) -> int:
    """Return by how much bytes become more than `EXPANSION_MAX` times as many."""
    return unpacked_bytes - EXPANSION_MAX * arrived_bytes


def decompress(
    name: str, data: memoryview, lengths: Sequence[int], size: int
) -> memoryview:
    """Return the bytes that `compress` was given, writable.

    Args:
        data: compressed blocks; not trusted.
        lengths: of the blocks; checked by `check_lengths`.
    """
    opened = _decompressor(name)
    # Not a bytearray: that is filled with zeros, while no other thread runs.
    whole = np.empty(size, np.uint8).data
    start = 0
    for room, length in zip(_cut(whole), lengths, strict=True):
        block = data[start : start + length]
        start += length
        room[:] = block if length == room.nbytes else opened(block, room.nbytes)
    return whole


def check_lengths(lengths: Any, size: int, arrived_bytes: int) -> None:
    """Refuse lengths of blocks that cannot be those of `size` bytes."""
    blocks = -(-size // BLOCK_BYTES)
    if type(lengths) is not list or len(lengths) != blocks:
        raise DecodeError(
            f"{size} compressed bytes take {blocks} blocks, not {lengths!r:.60}"
        )
    for index, length in enumerate(lengths):
        room = min(BLOCK_BYTES, size - index * BLOCK_BYTES)
        if type(length) is not int or not 0 < length <= room:
            raise DecodeError(
                f"a block of {room} bytes was compressed to {length!r:.20}"
            )
    if sum(lengths) != arrived_bytes:
        raise DecodeError(
            f"{arrived_bytes} compressed bytes arrived instead of {sum(lengths)}"
        )


def _cut(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, data.nbytes, BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def _compressor(name: str) -> Callable[[memoryview], bytes]:
    module = importlib.import_module(_MODULES[name])
    if name == "lz4":
        return lambda block: module.compress(block, store_size=False)
    compressor = module.ZstdCompressor(level=_ZSTD_LEVEL)
    return compressor.compress  # type: ignore[no-any-return]


def _decompressor(name: str) -> Callable[[memoryview, int], bytes]:
    package = missing_package(name)
    if package:
        raise DecodeError(
            f"a payload is compressed by {name!r}, and this worker lacks the package"
            f" for it: install {package!r} here, or call without this codec"
        )
    return _open_lz4 if name == "lz4" else _open_zstd


def _open_lz4(block: memoryview, size: int) -> bytes:
    module = importlib.import_module(_MODULES["lz4"])
    try:
        opened: bytes = module.decompress(block, uncompressed_size=size)
    except module.LZ4BlockError as error:
        raise DecodeError(f"a block compressed by lz4 is damaged: {error}") from error
    return _checked(opened, size)


def _open_zstd(block: memoryview, size: int) -> bytes:
    module = importlib.import_module(_MODULES["zstd"])
    try:
        # zstandard allocates what the frame says: check that first.
        if module.frame_content_size(block) != size:
            raise DecodeError(f"a block compressed by zstd does not have {size} bytes")
        decompressor = module.ZstdDecompressor(max_window_size=BLOCK_BYTES)
        opened: bytes = decompressor.decompress(block)
    except module.ZstdError as error:
        raise DecodeError(f"a block compressed by zstd is damaged: {error}") from error
    return _checked(opened, size)


def _checked(opened: bytes, size: int) -> bytes:
    if len(opened) != size:
        raise DecodeError(
            f"a compressed block became {len(opened)} bytes instead of {size}"
        )
    return opened
