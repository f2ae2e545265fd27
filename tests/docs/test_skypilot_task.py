"""The tasks of the page on SkyPilot are such as SkyPilot takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/how-to/run-on-skypilot.md").read_text("utf-8")
SCHEMA = json.loads(Path(__file__).with_name("skypilot_task.json").read_text("utf-8"))
FIRST, CHANGE = (
    yaml.safe_load(text)
    for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
)


@pytest.mark.parametrize("task", [FIRST, FIRST | CHANGE], ids=["first", "changed"])
def test_task_fits_the_schema_of_skypilot(task: dict[str, Any]) -> None:
    jsonschema.validate(task, SCHEMA)


def test_schema_refuses_unknown_fields() -> None:
    with pytest.raises(jsonschema.ValidationError, match="num_node"):
        jsonschema.validate(FIRST | {"num_node": 2}, SCHEMA)
