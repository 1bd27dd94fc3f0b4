from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp import AmpConfig, LossScale
from autotune_amp.core.config import MIN_LOSS_SCALE, RECOMMENDED_VARIABLES, FallbackPlan
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.precisions import PRECISIONS, Precision

BF16 = FallbackPlan(precision="bf16", batch_size=8)
FP32 = FallbackPlan(precision="fp32", batch_size=2, accumulation_steps=4, slowdown=2.5)

loss_scales = st.builds(
    LossScale,
    init_scale=st.floats(1.0, 2.0**24),
    growth_factor=st.floats(1.01, 10),
    backoff_factor=st.floats(0.01, 1),
    growth_interval=st.integers(1, 10**6),
    hysteresis=st.integers(1, 100),
    min_scale=st.none() | st.floats(MIN_LOSS_SCALE, 1.0),
)


printable = st.text().filter(str.isprintable)


@st.composite
def configs(draw: st.DrawFn) -> AmpConfig:
    precision = draw(st.sampled_from(PRECISIONS))
    below = [name for name in PRECISIONS[: PRECISIONS.index(precision)][::-1] if draw(st.booleans())]
    return AmpConfig(
        precision=precision,
        batch_size=draw(st.integers(1, 10**6)),
        accumulation_steps=draw(st.integers(1, 1000)),
        loss_scale=draw(loss_scales) if precision == "fp16" else None,
        fallback=[draw(st.sampled_from([name, msgspec.structs.replace(FP32, precision=name)])) for name in below],
        pinned_modules=tuple(draw(st.lists(printable, max_size=3))),
        num_workers=draw(st.none() | st.integers(0, 128)),
        environment=draw(st.dictionaries(st.sampled_from(RECOMMENDED_VARIABLES), printable, max_size=3)),
        as_found=draw(st.booleans()),
    )


@given(configs())
def test_a_config_survives_json(config: AmpConfig) -> None:
    text = config.to_json()
    assert AmpConfig.from_json(text) == config
    assert set(json.loads(text)) == set(AmpConfig.__struct_fields__)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"precision": "int8", "batch_size": 4}, "int8"),
        ({"precision": "fp32", "batch_size": 0}, "batch_size is 0"),
        ({"precision": "fp32", "batch_size": 4, "accumulation_steps": -1}, "accumulation_steps is -1"),
        ({"precision": "fp32", "batch_size": 4, "num_workers": True}, "num_workers is True"),
        ({"precision": "fp16", "batch_size": 4}, "with fp16"),
        ({"precision": "bf16", "batch_size": 4, "loss_scale": LossScale()}, "only fp16 has a loss scale"),
        ({"precision": "bf16", "batch_size": 4, "fp8_recipe": "tensorwise"}, "left out: only fp8 has recipes"),
        ({"precision": "fp8", "batch_size": 4, "fp8_recipe": "columnwise"}, "one of rowwise, tensorwise"),
        ({"precision": "fp8", "batch_size": 4, "weights": "bf16"}, "only bf16 can have bf16 weights"),
    ],
)
def test_an_impossible_config_is_refused_by_name(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word) as caught:
        AmpConfig(**fields)
    assert caught.value.next_step


@pytest.mark.parametrize(
    "fields",
    [
        {"init_scale": math.inf},
        {"init_scale": 2.0**25},
        {"init_scale": 0.5, "min_scale": 1.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.5},
        {"growth_interval": 0},
        {"hysteresis": 0},
        {"min_scale": 2.0**-25},
    ],
)
def test_a_loss_scale_that_destroys_weights_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields)) if "init_scale" not in fields else "init_scale"):
        LossScale(**fields)


@pytest.mark.parametrize(
    ("fields", "floor"),
    [
        ({}, 1.0),
        ({"init_scale": 2.0**-6}, 2.0**-18),
        ({"init_scale": 2.0**-14}, 2.0**-24),
        ({"init_scale": 1024.0, "min_scale": 8.0}, 8.0),
    ],
)
def test_the_scale_has_a_floor(fields: dict[str, Any], floor: float) -> None:
    assert LossScale(**fields).floor == floor


def test_names_are_taken_at_their_word_and_plans_as_measured() -> None:
    config = AmpConfig(
        precision="fp16", batch_size=8, accumulation_steps=3, loss_scale=LossScale(), fallback=["bf16", "tf32", FP32]
    )
    assert config.fallback == ("bf16", "tf32", FP32)
    assert config.plans == (
        FallbackPlan(precision="bf16", batch_size=8, accumulation_steps=3),
        FallbackPlan(precision="tf32", batch_size=8, accumulation_steps=3),
        FP32,
    )


def test_a_document_without_what_came_later_is_still_read() -> None:
    fp16 = AmpConfig(precision="fp16", batch_size=8, loss_scale=LossScale(min_scale=1.0), fallback=[BF16])
    older = json.loads(fp16.to_json())
    del older["loss_scale"]["hysteresis"], older["fallback"][0]["slowdown"]
    assert AmpConfig.from_json(json.dumps(older)) == fp16


@pytest.mark.parametrize(
    ("precision", "fallback", "said"),
    [
        ("bf16", ["fp32", "tf32"], "below bf16.*: out of tf32, fp32, in this order"),
        ("bf16", [BF16, FP32], "below bf16"),
        ("fp32", ["fp32"], "below fp32.*none"),
        ("bf16", ["int8"], "'int8'; it must be one of"),
        ("bf16", "fp32", "is 'fp32'; it must be a list"),
    ],
)
def test_an_impossible_fallback_is_refused(precision: Precision, fallback: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        AmpConfig(precision=precision, batch_size=4, fallback=fallback)


@pytest.mark.parametrize("text", ["", "{}", '{"precision": "fp32", "batch_size": 4, "unknown": 1}'])
def test_a_document_that_is_no_config(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="not an AmpConfig"):
        AmpConfig.from_json(text)
