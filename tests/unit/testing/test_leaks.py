"""Leaks are found and named; what is on its way out is waited for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

from asyncrpc.testing.leaks import ResourceSnapshot


def test_unchanged_resources_are_not_a_leak() -> None:
    leaks = ResourceSnapshot.take().compare()
    assert not leaks
    assert leaks.descriptors == leaks.threads == leaks.processes == leaks.tasks == ()


def test_leaked_descriptor_is_named_by_its_target() -> None:
    before = ResourceSnapshot.take()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    try:
        leaks = before.compare(grace_s=0)
        assert leaks.descriptors == (f"{descriptor} (/dev/null)",)
        assert "/dev/null" in str(leaks)
    finally:
        os.close(descriptor)
    assert not before.compare()


def test_reused_descriptor_number_is_still_a_leak() -> None:
    first = os.open(os.devnull, os.O_RDONLY)
    before = ResourceSnapshot.take()
    os.close(first)
    again = os.open("/dev/zero", os.O_RDONLY)
    try:
        assert again == first
        assert before.compare(grace_s=0).descriptors == (f"{again} (/dev/zero)",)
    finally:
        os.close(again)


def test_leaked_thread_is_named() -> None:
    before = ResourceSnapshot.take()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="asyncrpc-pool-0")
    thread.start()
    try:
        assert before.compare(grace_s=0).threads == ("asyncrpc-pool-0",)
    finally:
        release.set()
    assert not before.compare()  # it may take a moment to end
    thread.join()


def test_leaked_child_process_is_found_even_when_dead() -> None:
    before = ResourceSnapshot.take()
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        assert len(before.compare(grace_s=0).processes) == 1
    finally:
        child.wait()
    assert not before.compare()


async def test_leaked_task_is_named() -> None:
    before = ResourceSnapshot.take()
    release = asyncio.Event()
    task = asyncio.create_task(release.wait(), name="forgotten")
    assert before.compare(grace_s=0).tasks == ("forgotten",)
    release.set()
    assert not await before.compare_async()
    await task
