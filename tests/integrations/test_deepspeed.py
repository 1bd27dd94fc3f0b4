from __future__ import annotations

from typing import Any

import pytest

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations.deepspeed import deepspeed_config, unheld


def fp16(**options: Any) -> AmpConfig:
    return AmpConfig(precision="fp16", batch_size=8, accumulation_steps=4, loss_scale=LossScale(**options))


def test_the_loss_scale_in_deepspeeds_words() -> None:
    config = fp16(init_scale=3000.0, growth_interval=50, hysteresis=2, min_scale=2.0, growth_factor=4.0)
    assert deepspeed_config(config)["fp16"] == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 11,
        "loss_scale_window": 50,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 2,
    }
    said = " ".join(unheld(config))
    assert "init_scale 3000.0 is rounded down to a power of two, 2048.0." in said
    assert "growth_factor 4.0 has no key: it is 2.0." in said
    assert "max_scale 16777216.0 has no key" in said
    assert "min_scale" not in said


def test_what_becomes_of_the_bounds_is_said_exactly() -> None:
    config = fp16(init_scale=2.0**20, min_scale=2.0**-10, max_scale=2.0**30)
    assert deepspeed_config(config)["fp16"]["initial_scale_power"] == 20
    assert unheld(config)[1:] == [
        "min_scale 0.0009765625 becomes 1, a whole number from 1 up.",
        "max_scale 1073741824.0 has no key: the scale is unbounded.",
    ]
    assert "min_scale 0.015625 becomes 1, a whole number from 1 up." in unheld(fp16(init_scale=64.0))  # its floor


def test_a_scale_below_its_least_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"scale 0\.0009765625: its least scale is 1"):
        deepspeed_config(fp16(init_scale=2.0**-10))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_the_other_precisions_have_no_scaler(precision: Any) -> None:
    document = deepspeed_config(AmpConfig(precision=precision, batch_size=8, num_workers=2, pinned_modules=("head",)))
    assert document["fp16"] == {"enabled": False}
    assert document["bf16"] == {"enabled": precision == "bf16"}
    said = " ".join(unheld(AmpConfig(precision=precision, batch_size=8, num_workers=2, pinned_modules=("head",))))
    assert "num_workers=2" in said
    assert "head" in said


@pytest.mark.parametrize(
    "config",
    [
        AmpConfig(precision="fp32", batch_size=3),
        AmpConfig(precision="bf16", batch_size=8, accumulation_steps=4),
        fp16(init_scale=8192.0, growth_interval=50, hysteresis=3),
    ],
    ids=lambda config: str(config.precision),
)
def test_deepspeeds_own_classes_read_it(config: AmpConfig) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed has no wheel; pip install 'autotune_amp[deepspeed]' builds it")
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig(deepspeed_config(config))
    sizes = (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps, read.train_batch_size)
    assert sizes == (config.batch_size, config.accumulation_steps, config.batch_size * config.accumulation_steps)
    enabled = (read.float16_config.enabled, read.bfloat16_config.enabled)
    assert enabled == (config.precision == "fp16", config.precision == "bf16")
    if (scale := config.loss_scale) is not None:
        assert read.float16_config.loss_scale == 0
        arguments = read.float16_config.dynamic_loss_scale_args()
        assert sorted(arguments.values()) == sorted(
            [scale.init_scale, scale.growth_interval, scale.hysteresis, False, scale.floor]
        )
