"""The schemas of API servers, which manifests are checked against.

Those of the core are in the package `kubernetes-validate`; the strict ones refuse
fields that they do not know, as `kubectl --validate=strict` does.  Those of custom
resources are in `crds`, whose README says where they are from.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import jsonschema
import yaml
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

OLDEST: Final = "1.30"  # whose preStop may sleep
NEWEST: Final = "1.37"
_FOLDER: Final = Path(__file__).parent / "crds"


class ManifestRefusedError(Exception):
    """A cluster would refuse this object."""


def check_objects(manifests: list[dict[str, Any]], version: str = NEWEST) -> None:
    """Raise unless a cluster would take all of these."""
    for manifest in manifests:
        check_object(manifest, version)


def check_object(manifest: dict[str, Any], version: str = NEWEST) -> None:
    """Raise unless a cluster of this version would take an object.

    Raises:
        ManifestRefusedError: the schema refuses it; the message says where.
    """
    try:
        _validator(manifest["apiVersion"], manifest["kind"], version).validate(manifest)
    except jsonschema.ValidationError as error:
        where = "/".join(map(str, error.absolute_path))
        raise ManifestRefusedError(f"{where}: {error.message}") from error


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> jsonschema.Validator:
    """Return what checks objects of a kind; to make it reads a megabyte of JSON."""
    schema = custom_schemas().get((api_version, kind))
    if schema is None:
        # The files are named `job-batch-v1`, and `networkpolicy-networking-v1`.
        group, _, number = api_version.rpartition("/")
        names = (kind.lower(), group.partition(".")[0], number)
        schema = _core_schema("-".join(filter(None, names)), version)
    registry: Registry[Any] = _core_types(version) @ Registry()
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def custom_schemas() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the schemas of custom resources, by API version and kind."""
    schemas = {}
    for path in _FOLDER.glob("*.yaml"):
        definition = yaml.safe_load(path.read_text(encoding="utf-8"))
        key = (f"{definition['group']}/{definition['version']}", definition["kind"])
        # References are relative to it, as in Kubernetes' own schemas.
        identity = {"$id": f"https://kubernetes.io/api/{path.stem}"}
        schemas[key] = identity | _closed(definition["openAPIV3Schema"])
    return schemas


def _closed(schema: Any) -> Any:
    """Refuse fields that a schema does not name, as strict validation does."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


@functools.cache
def _core_types(version: str) -> Resource[Any]:
    """Return Kubernetes' own types, which all schemas refer to."""
    return Resource.from_contents(_core_schema("_definitions", version))


def _core_schema(name: str, version: str) -> Any:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    return schema_contents(f"{folder}/{name}.json", version)
