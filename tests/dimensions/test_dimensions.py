"""The dimensions of a setting, and that another one is one object and one field."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import autotune_amp
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import DIMENSIONS

HERE = Path(__file__).parent


def test_each_field_of_a_setting_is_a_dimension_with_its_default() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(Setting)}
    assert list(fields) == [dimension.name for dimension in DIMENSIONS]
    for dimension in DIMENSIONS:
        assert fields[dimension.name].default == dimension.default


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `toy_search.py` comes to in this package as it is with another dimension.

    That is added as a maintainer would add it: the file of its object, its field, and its line in the list.
    """
    folder = tmp_path_factory.mktemp("package")
    package = folder / "autotune_amp"
    shutil.copytree(Path(autotune_amp.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "toy_dimension.py", package / "dimensions" / "fused.py")
    setting, listed = package / "core" / "setting.py", package / "dimensions" / "__init__.py"
    for file, before, line in (
        (setting, "    batch_size: ", '    fused: Annotated[str, Label("{} fused".format)] = "no"\n'),
        (listed, "from autotune_amp.dimensions.fp8_recipe ", "from autotune_amp.dimensions.fused import FUSED\n"),
        (listed, "    BATCH_SIZE,\n", "    FUSED,\n"),
    ):
        text = file.read_text()
        assert text.count(before) == 1
        file.write_text(text.replace(before, line + before))
    paths = os.pathsep.join(
        map(str, (folder, HERE, HERE.parent / "search", HERE.parents[1] / "studies" / "landscapes"))
    )
    ended = subprocess.run(
        [sys.executable, str(HERE / "toy_search.py"), str(folder / "studies")],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


@pytest.mark.slow
def test_another_dimension_is_tried_checked_ranked_kept_and_shown(found: dict[str, Any]) -> None:
    search = found["none"]
    assert list(dict.fromkeys(search["tried"])) == ["bf16 partly fused batch 32", "bf16 wholly fused batch 32"]
    assert search["checked"] == ["no", "partly", "wholly"], "a verdict holds for one value"
    assert search["fused"] == "partly", "as fast within 3 %, and less to go wrong"
    assert search["are_read_back"]
    fates = {value: (status, reason) for name, value, status, reason in search["variants"] if name == "fused"}
    assert {value: status for value, (status, _) in fates.items()} == {
        "partly": "chosen",
        "wholly": "tried",
        "magically": "untried",
    }
    assert "has no magic" in fates["magically"][1]
    assert "bf16 partly fused batch 32" in search["text"]
    assert {"bf16", "bf16 partly fused", "bf16 wholly fused"} <= set(search["cells"])
    assert "model = fuse(model, 'partly')  # for torch" in search["script"]


@pytest.mark.slow
def test_a_value_that_does_harm_leaves_the_next(found: dict[str, Any]) -> None:
    assert found["partly"]["fused"] == "wholly"
    assert found["partly"]["plans"] == ["wholly"], "a fallback keeps it"
    assert found["partly"]["excluded"] == found["none"]["excluded"], "it says nothing of the precision without it"


@pytest.mark.slow
def test_a_trial_applies_it_and_no_check_that_does_not_know_it_calls_it_faithful(found: dict[str, Any]) -> None:
    job = found["job"]
    assert job["applied"] == "partly"
    assert job["verdict"] == "unchecked"
    assert "fused" in job["reason"]
