"""What the adapters share: readings for loggers, contradictions, a window that unscales once."""

from __future__ import annotations

import pytest

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations.bridge import has_window_of, readings, refuse_other
from autotune_amp.runtime.controller import PrecisionController

CONFIG = AmpConfig(precision="bf16", batch_size=4, accumulation_steps=2, fallback=["fp32"])


def test_the_rung_in_the_logs_counts_fallbacks_and_then_being_disabled() -> None:
    controller = PrecisionController(CONFIG, "cpu")
    rungs = [readings(CONFIG, controller.status())["rung"]]
    controller.set_precision("fp32")
    rungs.append(readings(CONFIG, controller.status())["rung"])
    controller.disable()
    rungs.append(readings(CONFIG, controller.status())["rung"])
    assert rungs == [0, 1, 2]


def test_what_a_framework_was_given_may_say_the_same_as_the_config_or_nothing() -> None:
    refuse_other("accumulation", None, 2)
    refuse_other("accumulation", 2, 2)
    with pytest.raises(InvalidRequestError, match="accumulation=3 contradicts") as raised:
        refuse_other("accumulation", 3, 2)
    assert "Leave accumulation out" in raised.value.next_step


def test_another_window_of_as_many_samples_is_another_window() -> None:
    assert has_window_of(CONFIG.plans[0], CONFIG)
    assert not has_window_of(AmpConfig(precision="fp32", batch_size=8, accumulation_steps=1), CONFIG)
