"""What a workload may be: what it must not be is said by its option."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.clusters.manifest.kubernetes.workload import (
    PodProbe,
    ProbeKind,
    Resources,
    byte_quantity,
    quantity,
)
from asyncrpc.errors import UsageError
from tests.unit.clusters.manifest.kubernetes.workloads import full, small


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "Trainer"}, "NAME must be a name of lower-case letters"),
        ({"name": ""}, "NAME must be a name"),
        ({"name": "1st"}, "begins with a letter"),
        ({"name": "a-"}, "does not end with '-'"),
        ({"name": "a.b"}, "NAME must be a name"),
        ({"name": "a" * 64}, "NAME must have at most 63 characters; it has 64"),
        ({"namespace": "a_b"}, "--namespace must be a name"),
        ({"secret": "a/b"}, "--secret must be a name"),
        ({"image": ""}, "--image must be an image's name"),
        ({"image": "a b"}, "--image must be an image's name"),
        ({"command": ()}, "the program is missing"),
        ({"command": ("",)}, "the program is missing"),
        ({"workers": 0}, "--workers must be at least 1 and at most 100000, not 0"),
        ({"workers": 100_001}, "--workers must be at least 1 and at most 100000"),
        ({"port": 0}, "--port must be at least 1 and at most 65535, not 0"),
        ({"grace_s": 0}, "--grace must be at least 1, not 0"),
        ({"pre_stop_s": -1}, "--pre-stop must be at least 0, not -1"),
        ({"restarts": -1}, "--restarts must be at least 0, not -1"),
        ({"user": -1}, "--user must be at least 0, not -1"),
        ({"environment": {"A B": ""}}, "--env must be NAME=VALUE with a variable's"),
        ({"environment": {"ASYNCRPC_SECRET": "x"}}, "--env must not hold the secret"),
        ({"environment": {"MASTER_ADDR": "x"}}, "--env must not set MASTER_ADDR"),
    ],
)
def test_wrong_field_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        small(**fields)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cpu": "four"}, "--cpu must be a quantity of Kubernetes, such as 500m"),
        ({"cpu": "0"}, "--cpu must be more than 0, not '0'"),
        ({"cpu": "-1"}, "--cpu must be a quantity"),
        ({"memory": "4GiB"}, "--memory must be a quantity"),
        ({"memory": "4000m"}, "--shm 1Gi must be less than --memory 4000m"),
        ({"memory": "128m"}, "'m' means thousandths"),
        ({"memory": "1Gi"}, "--shm 1Gi must be less than --memory 1Gi: the content"),
        ({"shared_memory": "1.5"}, "--shm must be a whole number of bytes"),
        ({"gpus": -1}, "--gpus must be at least 0"),
        ({"gpu_resource": "gpu"}, "--gpu-resource must be a name such as"),
    ],
)
def test_wrong_resource_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Resources(**fields)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2", 2),
        ("500m", 0.5),
        (".5", 0.5),
        ("1.", 1),
        ("4Gi", 4 * 1024**3),
        ("4G", 4 * 10**9),
        ("1k", 1000),
        ("1e3", 1000),
        ("5E-1", 0.5),
        ("1E", 10**18),
        ("1Ei", 1024**6),
        ("100n", 1e-7),
        ("3u", 3e-6),
    ],
)
def test_quantity_is_read_as_kubernetes_reads_it(text: str, number: float) -> None:
    assert float(quantity("q", text)) == number


@pytest.mark.parametrize(
    "text", ["", "Gi", "1gi", "1 Gi", "1e", "e3", "0x1", "1KI", "+"]
)
def test_malformed_quantity_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="q must be a quantity"):
        quantity("q", text)


def test_bytes_must_be_whole() -> None:
    assert byte_quantity("q", "1.5Ki") == 1536
    with pytest.raises(UsageError, match=r"whole number of bytes.*not '0.3'$"):
        byte_quantity("q", "0.3")


def test_name_with_its_index_must_be_a_label() -> None:
    small(name="a" * 61).check_pod_names()
    with pytest.raises(UsageError, match="at most 61 characters, since pods are"):
        small(name="a" * 62).check_pod_names()
    with pytest.raises(UsageError, match="at most 52 characters"):
        small(name="a" * 53).check_pod_names("-worker-0")


@pytest.mark.parametrize(
    ("text", "probe"),
    [
        ("none", PodProbe()),
        ("http:8080", PodProbe(ProbeKind.HTTP, 8080)),
        ("tcp:65535", PodProbe(ProbeKind.TCP, 65535)),
    ],
)
def test_probe_is_read(text: str, probe: PodProbe) -> None:
    assert PodProbe.parse(text) == probe


@pytest.mark.parametrize(
    "text", ["", "http", "http:", "http:0", "tcp:65536", "udp:1", "none:1", "tcp:x"]
)
def test_malformed_probe_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--probe must be http:PORT"):
        PodProbe.parse(text)


def test_workload_is_immutable() -> None:
    workload = full()
    with pytest.raises(TypeError):
        workload.environment["A"] = "b"  # type: ignore[index]


def test_secret_is_named_after_the_workload() -> None:
    assert small().secret == "trainer-secret"
    assert small(secret="other").secret == "other"
