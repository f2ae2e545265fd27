"""Only who knows the key is answered, and only an answer to one's own query counts."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.sidecar import pulse, query

NONCE = bytes(range(query.NONCE_BYTES))
INCARNATION = 0xFEDC_BA98_7654_3210
KEY = query.key_from(b"a secret", INCARNATION)
STATES = [pulse.GONE, pulse.STOPPED, pulse.BUSY, pulse.TICKING, pulse.UNKNOWN]


@pytest.mark.parametrize("state", STATES)
def test_query_and_its_answer_survive_packing(state: int) -> None:
    asked = query.pack_query(KEY, INCARNATION, NONCE)
    assert len(asked) == query.QUERY_BYTES
    nonce = query.read_query(KEY, INCARNATION, asked)
    assert nonce == NONCE
    answer = query.pack_answer(KEY, INCARNATION, nonce, state)
    assert len(answer) == query.ANSWER_BYTES
    assert query.read_answer(KEY, INCARNATION, NONCE, answer) == state


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_proof_is_the_hmac_of_the_standard(key: bytes, message: bytes) -> None:
    assert query.hmac_sha256(key, message) == hmac.digest(key, message, "sha256")


def test_key_depends_on_secret_and_incarnation() -> None:
    secrets = (None, b"a", b"b")
    keys = {
        query.key_from(secret, incarnation)
        for secret in secrets
        for incarnation in (1, 2)
    }
    assert len(keys) == 6
    assert {len(key) for key in keys} == {query.KEY_BYTES}


@pytest.mark.parametrize("at", range(query.QUERY_BYTES))
def test_changed_query_is_ignored(at: int) -> None:
    asked = bytearray(query.pack_query(KEY, INCARNATION, NONCE))
    asked[at] ^= 1
    assert query.read_query(KEY, INCARNATION, bytes(asked)) is None


@pytest.mark.parametrize("at", range(query.ANSWER_BYTES))
def test_changed_answer_is_ignored(at: int) -> None:
    answer = bytearray(query.pack_answer(KEY, INCARNATION, NONCE, pulse.BUSY))
    answer[at] ^= 1
    assert query.read_answer(KEY, INCARNATION, NONCE, bytes(answer)) is None


@given(st.binary(max_size=200))
def test_random_bytes_are_neither_query_nor_answer(record: bytes) -> None:
    assert query.read_query(KEY, INCARNATION, record) is None
    assert query.read_answer(KEY, INCARNATION, NONCE, record) is None


def test_answer_to_another_query_or_life_is_ignored() -> None:
    answer = query.pack_answer(KEY, INCARNATION, NONCE, pulse.GONE)
    assert query.read_answer(KEY, INCARNATION, bytes(16), answer) is None
    assert query.read_answer(KEY, INCARNATION + 1, NONCE, answer) is None
    asked = query.pack_query(KEY, INCARNATION, NONCE)
    assert query.read_query(KEY, INCARNATION + 1, asked) is None
    assert query.read_query(query.key_from(b"b", 1), INCARNATION, asked) is None
