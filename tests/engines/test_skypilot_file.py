"""SkyPilot accepts its file. `nox -s engines -- skypilot` runs this: SkyPilot needs another click than hp-trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

pytest.importorskip("sky", reason="`nox -s engines -- skypilot` installs SkyPilot, and checks its file")

import jsonschema
from sky.utils import schemas

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def test_skypilot_accepts_the_file() -> None:
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    jsonschema.validate(task, schemas.get_task_schema())
    with pytest.raises(jsonschema.ValidationError, match="num_node"):
        jsonschema.validate({**task, "num_node": 2}, schemas.get_task_schema())
