"""What the kernel and its pulse say of a process, and who may ask."""

from __future__ import annotations

import hmac
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.sidecar import pulse, query

NOW_NS = 10**12
FRESH_NS = int(pulse.FRESH_S * 1e9)
RECORD = pulse.Pulse(1, 2, 3, 4, NOW_NS)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for the end of its input."""
    program = "import sys; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def state_of(child: subprocess.Popen[bytes], started: int) -> int:
    return pulse.state_of(child.pid, started)


def test_runnable_process_is_busy(child: subprocess.Popen[bytes]) -> None:
    assert state_of(child, pulse.started_at(child.pid)) == pulse.BUSY


def test_stopped_process_is_reported_as_stopped(child: subprocess.Popen[bytes]) -> None:
    started = pulse.started_at(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert state_of(child, started) == pulse.STOPPED
    child.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    assert state_of(child, started) == pulse.BUSY


def test_unreaped_process_is_gone(child: subprocess.Popen[bytes]) -> None:
    started = pulse.started_at(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert state_of(child, started) == pulse.GONE
    child.wait()
    assert state_of(child, started) == pulse.GONE


def test_process_number_reused_by_another_is_gone(
    child: subprocess.Popen[bytes],
) -> None:
    assert state_of(child, pulse.started_at(child.pid) - 1) == pulse.GONE


def test_process_whose_first_thread_has_ended_still_runs() -> None:
    program = (
        "import ctypes, sys, threading\n"
        "stay = lambda: (print(flush=True), sys.stdin.read())\n"
        "threading.Thread(target=stay).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = pulse.started_at(process.pid)
        while pulse.stat_of(process.pid)[0] != b"Z":
            os.sched_yield()
        assert pulse.state_of(process.pid, started) == pulse.BUSY
        process.kill()


def test_process_name_with_parentheses_is_read_right() -> None:
    program = (
        "import ctypes, sys\n"
        "ctypes.CDLL(None).prctl(15, b') Z 1 (', 0, 0, 0)\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert pulse.state_of(process.pid, pulse.started_at(process.pid)) == pulse.BUSY
        process.kill()


@pytest.mark.parametrize("state", [pulse.GONE, pulse.STOPPED, pulse.UNKNOWN])
def test_kernel_state_precedes_the_pulse(state: int) -> None:
    assert pulse.judge(RECORD, state, NOW_NS) == state


@pytest.mark.parametrize(
    ("age_ns", "state"),
    [
        (0, pulse.TICKING),
        (FRESH_NS, pulse.TICKING),
        (FRESH_NS + 1, pulse.BUSY),
        (3600 * FRESH_NS, pulse.BUSY),
    ],
)
def test_recent_pulse_means_a_running_loop(age_ns: int, state: int) -> None:
    assert pulse.judge(RECORD, pulse.BUSY, NOW_NS + age_ns) == state


def test_missing_pulse_leaves_the_state_unknown() -> None:
    assert pulse.judge(None, pulse.BUSY, NOW_NS) == pulse.UNKNOWN


def test_pulse_record_is_read_as_it_was_written() -> None:
    descriptor = os.memfd_create(pulse.NAME)
    try:
        os.write(descriptor, RECORD.pack())
        for record in (
            pulse.read(descriptor),
            pulse.read_of(os.getpid(), descriptor),
        ):
            assert record is not None
            assert record.pack() == RECORD.pack()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "record", [b"", RECORD.pack()[:-1], b"X" + RECORD.pack()[1:], b"ARPL\xff" * 10]
)
def test_malformed_pulse_is_ignored(record: bytes) -> None:
    descriptor = os.memfd_create(pulse.NAME)
    try:
        os.write(descriptor, record)
        assert pulse.read(descriptor) is None
    finally:
        os.close(descriptor)


def test_descriptor_with_another_name_is_not_opened() -> None:
    descriptor = os.memfd_create("another")
    try:
        os.write(descriptor, RECORD.pack())
        assert pulse.read_of(os.getpid(), descriptor) is None
    finally:
        os.close(descriptor)
    assert pulse.read_of(os.getpid(), 10**6) is None


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
