"""Objects as text: YAML where PyYAML is installed, else JSON, which YAML includes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import Any, Final

from asyncrpc.errors import UsageError

FORMATS: Final = ("yaml", "json")


def default_format() -> str:
    """Return the format that is used if none is given."""
    return "json" if importlib.util.find_spec("yaml") is None else "yaml"


def as_text(objects: Sequence[dict[str, Any]], form: str) -> str:
    """Return objects as `kubectl apply -f -` reads them."""
    if form == "json":
        everything = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return json.dumps(everything, indent=2) + "\n"
    try:
        import yaml  # noqa: PLC0415  (an extra)
    except ImportError:
        raise UsageError(
            "YAML needs PyYAML: `pip install 'asyncrpc-torch[manifest]'`, or use "
            "--format json"
        ) from None

    class Dumper(yaml.SafeDumper):
        """Writes repeated objects in full: a reader need not know anchors."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    text: str = yaml.dump_all(
        objects, Dumper=Dumper, sort_keys=False, explicit_start=True
    )
    return text
