"""Squeezing: lossless compression of a buffer, in blocks, by optional packages.

A buffer is cut into blocks of 4 MiB, each squeezed by itself, or left as it is if that
does not make it shorter; they follow each other.  So what a block may become is known
before it is opened, a buffer may be of any size (lz4 takes 2 GiB at most), and neither
end ever holds more than one block besides the buffers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from asyncrpc.errors import DecodeError

BLOCK_BYTES: Final = 4 << 20
# Shorter buffers gain less than a message costs anyway.
SQUEEZE_BYTES_MIN: Final = 4 << 10
# What must be saved for the receiver to have to unpack: the 16th part.
_SAVED_SHIFT: Final = 4
# Level 1 against 3, the package's default: 1.5 times as fast on float32 numbers, and as
# long; on text as fast, and 3 % longer.
_ZSTD_LEVEL: Final = 1

_MODULES: Final = {"lz4": "lz4.block", "zstd": "zstandard"}
_PACKAGES: Final = {"lz4": "lz4", "zstd": "zstandard"}
NAMES: Final = tuple(_MODULES)


def missing_package(name: str) -> str:
    """Return what must be installed before `name` can be used; empty if nothing."""
    try:
        importlib.import_module(_MODULES[name])
    except ImportError:
        return _PACKAGES[name]
    return ""


def squeeze(name: str, data: memoryview) -> tuple[memoryview, list[int]] | None:
    """Return the squeezed blocks of `data` and their lengths; None if little is won.

    A block as long as it was before is the block itself.
    """
    if data.nbytes < SQUEEZE_BYTES_MIN:
        return None
    squeezed = _squeezer(name)
    parts: list[bytes | memoryview] = []
    for block in _cut(data):
        short = squeezed(block)
        parts.append(short if len(short) < len(block) else block)
    lengths = [len(part) for part in parts]
    if sum(lengths) > data.nbytes - (data.nbytes >> _SAVED_SHIFT):
        return None
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts)), lengths


def unsqueeze(name: str, data: memoryview, lengths: Sequence[int], size: int) -> Any:
    """Return the bytes that `squeeze` was given, writable.

    Args:
        name: of the codec.
        data: squeezed blocks; not trusted.
        lengths: of the blocks; checked by `check_lengths`.
        size: bytes to be returned.

    Raises:
        DecodeError: the bytes are damaged, or a package is missing.
    """
    opener = _opener(name)
    whole = bytearray(size)
    start = 0
    for room, length in zip(_cut(memoryview(whole)), lengths, strict=True):
        block = data[start : start + length]
        start += length
        room[:] = block if length == room.nbytes else opener(block, room.nbytes)
    return whole


def check_lengths(lengths: Any, size: int, squeezed_bytes: int) -> None:
    """Refuse lengths of blocks that cannot be those of `size` bytes.

    Raises:
        DecodeError: as said.
    """
    blocks = -(-size // BLOCK_BYTES)
    if type(lengths) is not list or len(lengths) != blocks:
        raise DecodeError(
            f"{size} squeezed bytes are {blocks} blocks, not {lengths!r:.60}"
        )
    for index, length in enumerate(lengths):
        room = min(BLOCK_BYTES, size - index * BLOCK_BYTES)
        if type(length) is not int or not 0 < length <= room:
            raise DecodeError(f"a block of {room} bytes was squeezed to {length!r:.20}")
    if sum(lengths) != squeezed_bytes:
        raise DecodeError(f"{squeezed_bytes} bytes arrived for {sum(lengths)} squeezed")


def _cut(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, data.nbytes, BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def _squeezer(name: str) -> Callable[[memoryview], bytes]:
    module = importlib.import_module(_MODULES[name])
    if name == "lz4":
        return lambda block: module.compress(block, store_size=False)
    compressor = module.ZstdCompressor(level=_ZSTD_LEVEL)
    return compressor.compress  # type: ignore[no-any-return]


def _opener(name: str) -> Callable[[memoryview, int], bytes]:
    package = missing_package(name)
    if package:
        raise DecodeError(
            f"a payload arrived squeezed by {name!r}, and this worker lacks the package"
            f" for it: install {package!r} here, or call without this codec"
        )
    return _open_lz4 if name == "lz4" else _open_zstd


def _open_lz4(block: memoryview, size: int) -> bytes:
    module = importlib.import_module(_MODULES["lz4"])
    try:
        opened: bytes = module.decompress(block, uncompressed_size=size)
    except module.LZ4BlockError as error:
        raise DecodeError(f"a block squeezed by lz4 is damaged: {error}") from error
    return _checked(opened, size)


def _open_zstd(block: memoryview, size: int) -> bytes:
    module = importlib.import_module(_MODULES["zstd"])
    try:
        # The frame says how long it becomes, and so much is allocated: it must not lie.
        if module.frame_content_size(block) != size:
            raise DecodeError(f"a block squeezed by zstd does not become {size} bytes")
        opened: bytes = module.ZstdDecompressor().decompress(block)
    except module.ZstdError as error:
        raise DecodeError(f"a block squeezed by zstd is damaged: {error}") from error
    return _checked(opened, size)


def _checked(opened: bytes, size: int) -> bytes:
    if len(opened) != size:
        raise DecodeError(f"a squeezed block became {len(opened)} bytes, not {size}")
    return opened
