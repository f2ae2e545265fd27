"""Kubernetes' own schemas, which manifests are checked against.

Those of the core are in the package `kubernetes-validate`; the strict ones refuse
fields that they do not know, as `kubectl --validate=strict` does.
"""

from __future__ import annotations

from typing import Any

import kubernetes_validate

OLDEST = "1.30"  # whose preStop may sleep
NEWEST = "1.37"


class ManifestRefusedError(Exception):
    """A cluster would refuse this object."""


def check_objects(found: list[dict[str, Any]], version: str = NEWEST) -> None:
    """Raise unless a cluster would take all of these."""
    for one in found:
        check_object(one, version)


def check_object(found: dict[str, Any], version: str = NEWEST) -> None:
    """Raise unless a cluster of this version would take an object.

    Raises:
        ManifestRefusedError: the schema refuses it; the message says where.
    """
    try:
        kubernetes_validate.validate(found, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = "/".join(map(str, error.absolute_path))
        raise ManifestRefusedError(f"{where}: {error.message}") from error
