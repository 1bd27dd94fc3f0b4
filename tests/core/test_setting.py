"""One setting in every shape it has: a config, a fallback plan, a row of the table, what an exclusion covers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from autotune_amp import AmpConfig
from autotune_amp.core.config import FallbackPlan
from autotune_amp.core.recommendation import CandidateRow
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import risks

# Every dimension away from its default: a further one belongs here.
FULL = Setting(
    precision="bf16", batch_size=8, accumulation_steps=2, as_found=True, pinned_modules=("head",), num_workers=3
)
ROW = {"status": "measured", "samples_per_second": 1.0, "step_seconds": 1.0, "peak_memory_bytes": 1, "reason": None}


@pytest.mark.parametrize(("kind", "others"), [(AmpConfig, {}), (FallbackPlan, {}), (CandidateRow, ROW)])
def test_configs_plans_and_rows_hold_the_whole_setting_flat_in_their_json(
    kind: type[Setting], others: dict[str, Any]
) -> None:
    held = kind.of(FULL, **others)
    document = msgspec.json.decode(msgspec.json.encode(held))
    assert {name: document[name] for name in Setting.__struct_fields__} == json.loads(msgspec.json.encode(FULL))
    assert Setting.of(held) == FULL
    assert Setting.of(msgspec.json.decode(msgspec.json.encode(held), type=kind)) == FULL


def test_ordinary_puts_every_further_dimension_at_its_default() -> None:
    ordinary = Setting(precision="bf16", batch_size=8, accumulation_steps=2)
    assert FULL.ordinary == AmpConfig.of(FULL).ordinary == ordinary
    assert ordinary.is_ordinary
    for name in ("as_found", "pinned_modules", "num_workers"):
        assert not msgspec.structs.replace(ordinary, **{name: getattr(FULL, name)}).is_ordinary


def test_a_settings_name_has_every_value_away_from_its_default_in_the_order_of_the_fields() -> None:
    plain = Setting(precision="fp32", batch_size=1)
    assert str(plain) == "fp32 batch 1"
    others = {"optimizer_impl": "fused", "weights": "bf16", "cudnn_benchmark": "on", "compile": "default"}
    named = msgspec.structs.replace(FULL, **others)
    further = "bf16 weights cudnn benchmark fused optimizer compiled (default)"
    assert str(named) == f"bf16 batch 8 x 2 as found with 1 module pinned with 3 loader workers {further}"
    assert named.labelled(["compile", "precision"]) == "bf16 compiled (default)"


def test_what_a_precision_does_not_allow_is_named() -> None:
    bf16 = Setting(precision="bf16", batch_size=8, weights="bf16")
    assert bf16.misfits == {}
    assert msgspec.structs.replace(bf16, precision="fp32").misfits.keys() == {"weights"}
    assert msgspec.structs.replace(bf16, fp8_recipe="tensorwise").misfits.keys() == {"fp8_recipe"}
    assert Setting(precision="fp8", batch_size=8, fp8_recipe="tensorwise").misfits == {}


def test_an_fp8_recipe_is_active_in_fp8_alone_and_goes_with_it() -> None:
    fp8 = Setting(precision="fp8", batch_size=8, compile="default")
    assert fp8.active_variants == {"fp8_recipe": "rowwise", "compile": "default"}
    assert fp8.without_fp8 == Setting(precision="bf16", batch_size=8, compile="default")
    assert fp8.without_variants == Setting(precision="bf16", batch_size=8)


def test_the_users_own_number_of_loader_workers_is_the_least_risk_and_none_the_next() -> None:
    own, none, two = (Setting(precision="fp32", batch_size=8, num_workers=num) for num in (None, 0, 2))
    assert risks(own) < risks(none) < risks(two)
