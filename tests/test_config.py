from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp import AmpConfig, LossScale
from autotune_amp.config import PRECISIONS, FallbackPlan
from autotune_amp.errors import InvalidRequestError

scales = st.floats(1.0, 2.0**24)
loss_scales = st.builds(
    LossScale,
    init_scale=scales,
    growth_factor=st.floats(1.01, 10),
    backoff_factor=st.floats(0.01, 1),
    growth_interval=st.integers(1, 10**6),
)
plans = st.builds(
    FallbackPlan,
    precision=st.sampled_from(PRECISIONS),
    batch_size=st.integers(1, 10**6),
    accumulation_steps=st.integers(1, 1000),
    peak_memory_bytes=st.none() | st.integers(0, 2**50),
    samples_per_second=st.none() | st.floats(0.001, 1e9),
)


@st.composite
def configs(draw: st.DrawFn) -> AmpConfig:
    precision = draw(st.sampled_from(PRECISIONS))
    return AmpConfig(
        precision=precision,
        batch_size=draw(st.integers(1, 10**6)),
        accumulation_steps=draw(st.integers(1, 1000)),
        loss_scale=draw(loss_scales) if precision == "fp16" else None,
        fallback=tuple(draw(st.lists(plans, max_size=3))),
        pinned_modules=tuple(draw(st.lists(st.text(), max_size=3))),
        environment=draw(st.dictionaries(st.text(), st.text(), max_size=3)),
    )


@given(configs())
def test_a_config_survives_json(config: AmpConfig) -> None:
    text = config.to_json()
    assert AmpConfig.from_json(text) == config
    assert set(json.loads(text)) == {
        "precision",
        "batch_size",
        "accumulation_steps",
        "loss_scale",
        "fallback",
        "pinned_modules",
        "environment",
    }


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"precision": "int8", "batch_size": 4}, "int8"),
        ({"precision": "fp32", "batch_size": 0}, "batch_size is 0"),
        ({"precision": "fp32", "batch_size": True}, "batch_size is True"),
        ({"precision": "fp32", "batch_size": 4, "accumulation_steps": -1}, "accumulation_steps is -1"),
        ({"precision": "fp16", "batch_size": 4}, "fp16 needs a loss scale"),
        ({"precision": "bf16", "batch_size": 4, "loss_scale": LossScale()}, "no other precision takes one"),
    ],
)
def test_an_impossible_config_is_refused_by_name(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word) as caught:
        AmpConfig(**fields)
    assert caught.value.next_step


@pytest.mark.parametrize(
    "fields",
    [
        {"init_scale": 0.0},
        {"init_scale": math.inf},
        {"init_scale": math.nan},
        {"init_scale": 2.0**25},
        {"init_scale": 0.5},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.5},
        {"growth_interval": 0},
        {"min_scale": -1.0},
    ],
)
def test_a_loss_scale_that_destroys_weights_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields)) if "init_scale" not in fields else "init_scale"):
        LossScale(**fields)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"precision": "fp32", "batch_size": 4, "unknown": 1}'])
def test_a_document_that_is_no_config(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="not an AmpConfig"):
        AmpConfig.from_json(text)


def test_a_config_is_frozen_and_has_a_schema() -> None:
    config = AmpConfig(precision="fp32", batch_size=4)
    with pytest.raises(AttributeError):
        config.batch_size = 8  # type: ignore[misc]  # that is the point
    assert "AmpConfig" in json.dumps(AmpConfig.json_schema())
