"""The query that a sidecar answers, and its answer: two records of fixed size.

    query    "ARWQ" | version u8 | 3 zero bytes | incarnation u64 | nonce 16 | proof 32
    answer   "ARWA" | version u8 | state u8 | 2 zero bytes | nonce 16 | proof 32

Integers are little-endian.  A proof is HMAC-SHA-256 over what comes before it in the
record and, in an answer, the incarnation; its key comes from the cluster's secret.  An
answer repeats the nonce of its query, which is random: it cannot be an old one.

Sans-IO: bytes in, bytes out; nonces are passed in.

Source: RFC 2104 (HMAC), FIPS 180-4 (SHA-256).
"""

from __future__ import annotations

import struct

try:  # hashlib would load all of OpenSSL: 4 MiB
    from _sha2 import sha256  # type: ignore[import-not-found]
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found]  # before 3.12
    except ImportError:
        from hashlib import sha256

NONCE_BYTES = 16
KEY_BYTES = 32
_PROOF_BYTES = 32
_VERSION = 1
_QUERY = struct.Struct(f"<4sB3xQ{NONCE_BYTES}s")
_ANSWER = struct.Struct(f"<4sBB2x{NONCE_BYTES}s")
ASKED, _ANSWERED = b"ARWQ", b"ARWA"
QUERY_BYTES = _QUERY.size + _PROOF_BYTES
ANSWER_BYTES = _ANSWER.size + _PROOF_BYTES

_BLOCK_BYTES = 64
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))


def key_from(secret: bytes | None, incarnation: int) -> bytes:
    """Return the key of a worker's sidecar.

    Without a secret it comes from the incarnation, which is random but not hidden: then
    an answer proves no more than that its sender has met the worker.
    """
    return hmac_sha256(secret or b"", b"asyncrpc sidecar" + incarnation.to_bytes(8))


def pack_query(key: bytes, incarnation: int, nonce: bytes) -> bytes:
    """Return the query for what became of one incarnation."""
    record = _QUERY.pack(ASKED, _VERSION, incarnation, nonce)
    return record + hmac_sha256(key, record)


def read_query(key: bytes, incarnation: int, record: bytes) -> bytes | None:
    """Return the nonce of a query for this incarnation; None if it is not one."""
    if len(record) != QUERY_BYTES:
        return None
    magic, version, asked, nonce = _QUERY.unpack_from(record)
    if (magic, version, asked) != (ASKED, _VERSION, incarnation):
        return None
    proof = hmac_sha256(key, record[:-_PROOF_BYTES])
    return nonce if _is_same(proof, record[-_PROOF_BYTES:]) else None


def pack_answer(key: bytes, incarnation: int, nonce: bytes, state: int) -> bytes:
    """Return the answer to a query."""
    record = _ANSWER.pack(_ANSWERED, _VERSION, state, nonce)
    return record + hmac_sha256(key, record + incarnation.to_bytes(8))


def read_answer(
    key: bytes, incarnation: int, nonce: bytes, record: bytes
) -> int | None:
    """Return the state in an answer; None if it does not answer our query."""
    if len(record) != ANSWER_BYTES:
        return None
    magic, version, state, echo = _ANSWER.unpack_from(record)
    if (magic, version, echo) != (_ANSWERED, _VERSION, nonce):
        return None
    message = record[:-_PROOF_BYTES] + incarnation.to_bytes(8)
    return (
        state if _is_same(hmac_sha256(key, message), record[-_PROOF_BYTES:]) else None
    )


def hmac_sha256(key: bytes, message: bytes) -> bytes:
    """Return what `hmac.digest(key, message, "sha256")` does, without its imports."""
    if len(key) > _BLOCK_BYTES:
        key = sha256(key).digest()
    key = key.ljust(_BLOCK_BYTES, b"\0")
    inner = sha256(key.translate(_INNER) + message).digest()
    digest: bytes = sha256(key.translate(_OUTER) + inner).digest()
    return digest


def _is_same(first: bytes, second: bytes) -> bool:
    """Compare in a time that does not tell where they differ."""
    difference = 0
    for a, b in zip(first, second, strict=True):
        difference |= a ^ b
    return not difference
