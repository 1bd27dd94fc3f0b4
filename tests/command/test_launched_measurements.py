"""What a run that was heard amounts to."""

from __future__ import annotations

from typing import Any

import pytest
import said
from msgspec.structs import replace

from autotune_amp.command.measure import (
    autocast_precision,
    description,
    is_enough,
    measurement,
    precision_of,
    predicted_measurement_seconds,
    todays_precision,
)
from autotune_amp.command.messages import Message, Switch
from autotune_amp.command.ranks import RunEvents
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.trial.jobs import Trial


def trial() -> Trial:
    return Trial(device="cpu", candidate=Setting(precision="fp32", batch_size=8), num_steps=(4, 16), seed=0)


def measured(heard: RunEvents, memory_bytes: int = 0) -> Measurement | Failure:
    return measurement(heard, trial(), 0.0, memory_bytes)


def test_ranks_are_one_measurement() -> None:
    heard = said.trained([10, 12])
    found = measured(heard)
    assert isinstance(found, Measurement)
    assert found.samples_per_second == pytest.approx(16 / said.STEP_SECONDS)
    assert found.num_compiling_steps == 0
    assert found.peak_memory_bytes == 1000, "of one rank, as its controller sees it"
    assert found.reserved_memory_bytes == 2000, "of both ranks, which share the host's"


def test_each_step_counts_alike_whatever_the_number_that_is_timed_together() -> None:
    """As on an accelerator, which is waited for at the first steps and then at each fourth one."""
    heard = said.heard([said.hello(1), said.torch(1), said.loader(1), said.optimizer(1)])
    for number in range(1, 13):
        seconds = 2.0 * min(number, 3) + max(0, number - 3)  # the third step is slower than those after it
        is_settled = number <= 4 or number % 4 == 0
        heard.add(said.step(1, number, time=seconds, is_settled=is_settled, wait_seconds=seconds / 2))
    found = measured(heard)
    assert isinstance(found, Measurement)
    assert found.raw_step_seconds == (2.0, 1.0, 1.0, 1.0)
    assert found.step_seconds == pytest.approx(1.1)
    assert found.samples_per_second * found.step_seconds == pytest.approx(8)
    assert found.data_seconds == pytest.approx(found.step_seconds / 2)
    assert found.num_steps <= 10, "so many were measured"


def test_what_counts_against_the_limit_is_all_processes_on_a_cpu_and_the_largest_rank_elsewhere() -> None:
    found = measured(said.trained([10, 10]), memory_bytes=5000)
    assert isinstance(found, Measurement)
    assert (found.peak_memory_bytes, found.reserved_memory_bytes) == (1000, 5000)
    found = measured(said.trained([10, 10], reserved_memory_bytes=1500), memory_bytes=5000)
    assert isinstance(found, Measurement)
    assert (found.peak_memory_bytes, found.reserved_memory_bytes) == (1000, 1500)
    without_memory = said.trained([10, 10], peak_memory_bytes=None)  # on an accelerator that counts none
    for rank in without_memory.ranks.values():
        rank.optimizers[0] = replace(rank.optimizers[0], devices=("xpu:0",))
    found = measurement(without_memory, replace(trial(), device="xpu", memory_limit_bytes=4000), 0.0, 5000)
    assert isinstance(found, Measurement)
    assert found.reserved_memory_bytes == 0


def test_a_run_is_measured_once_its_slowest_rank_is() -> None:
    def predicted(*step_seconds: float) -> float | None:
        messages: list[Message] = []
        for rank, seconds in enumerate(step_seconds):
            messages += [said.optimizer(rank, rank, len(step_seconds))]
            messages += [said.step(rank, number, time=1.0 + seconds * number) for number in range(1, 4)]
        return predicted_measurement_seconds(said.heard(messages), 1.0)

    assert predicted(0.1, 0.4) == predicted(0.4, 0.4)
    assert predicted(0.1, 0.1) == pytest.approx((predicted(0.4, 0.4) or 0.0) / 4)


def test_a_loss_that_is_no_number_is_no_measurement() -> None:
    heard = said.trained([10, 10])
    heard.add(said.step(101, 11, losses=("nan",)))
    found = measured(heard)
    assert isinstance(found, Failure)
    assert (found.kind, found.message) == ("nonfinite", "rank 1: the loss became nan")
    heard.add(said.step(101, 12))  # the weights have borne it
    assert isinstance(measured(heard), Measurement)


def test_what_is_measured_begins_where_the_loss_scale_has_come_down() -> None:
    heard = said.trained([0])
    heard.add(said.optimizer(100))
    for number in range(1, 21):
        heard.add(said.step(100, number, is_skipped=number <= 12))
    found = measured(heard)
    assert isinstance(found, Measurement)
    assert (found.num_skips, found.num_steps) == (0, 7)


def test_it_is_enough_only_once_every_rank_is_measured() -> None:
    assert is_enough(said.trained([20, 20]), trial(), 0.0)
    assert not is_enough(said.trained([20, 3]), trial(), 0.0)


@pytest.mark.parametrize(
    ("steps", "optimizer", "precision"),
    [
        ({}, {}, "fp32"),
        ({"regions": ("cpu:bfloat16",)}, {}, "bf16"),
        ({"regions": ("cpu:off", "cpu:float16")}, {}, "fp16"),
        ({"regions": ("cuda:float16",)}, {}, "fp32"),
        ({"regions": ("cuda:float16",)}, {"devices": ("cuda:1",)}, "fp16"),
        ({}, {"num_parameters": {"bfloat16": 9, "float32": 1}}, "bf16"),
        ({}, {"uses_tf32": True}, "tf32"),
        ({"regions": ("cpu:bfloat16",)}, {"uses_tf32": True}, "bf16"),
        ({"forwards": (("FSDPNet", 8, "bfloat16"),)}, {}, "bf16"),
        ({"forwards": (("Net", 8, "float32"),), "num_compilations": 1}, {}, "fp32"),
        ({"num_compilations": 1}, {}, None),
        ({"num_compilations": 1, "regions": ("cpu:off",)}, {}, "fp32"),
    ],
)
def test_precision_is_what_the_passes_ran_in(
    steps: dict[str, Any], optimizer: dict[str, Any], precision: str | None
) -> None:
    messages: list[Message] = [said.optimizer(7, **optimizer), said.step(7, 1, **steps), said.step(7, 2)]
    (rank,) = said.heard(messages).ranks.values()
    assert precision_of(rank) == precision


@pytest.mark.parametrize(
    ("steps", "optimizer", "precision", "weights"),
    [
        ({"forwards": (("Llama", 8, "bfloat16"),)}, {"num_parameters": {"bfloat16": 9}}, "fp32", "bf16"),
        ({"forwards": (("Llama", 8, "bfloat16"),), "regions": ("cpu:bfloat16",)}, {}, "bf16", "fp32"),
        ({"forwards": (("Peft", 8, "bfloat16"),)}, {"num_frozen": {"bfloat16": 99}}, "fp32", "frozen_low"),
        ({"forwards": (("FSDPNet", 8, "bfloat16"),)}, {}, "bf16", "fp32"),
        ({"is_skipped": True}, {"num_parameters": {}}, "fp32", "fp32"),  # ZeRO-3 skips its first step
    ],
)
def test_what_weights_are_kept_in_is_not_what_autocast_is_in(
    steps: dict[str, Any], optimizer: dict[str, Any], precision: str, weights: str
) -> None:
    messages: list[Message] = [said.optimizer(7, **optimizer), said.step(7, 1, **steps), said.step(7, 2)]
    (rank,) = said.heard(messages).ranks.values()
    today = Setting(precision=autocast_precision(rank), batch_size=8)
    assert (today.precision, description(rank, "train", today, 0.0).weights) == (precision, weights)


@pytest.mark.parametrize(
    ("stated", "precision"),
    [(None, "fp32"), ({"precision": "fp32"}, "fp32"), ({"precision": "bf16"}, "bf16"), ({}, "bf16")],
)
def test_weights_that_a_framework_converts_are_its_precision(stated: dict[str, Any] | None, precision: str) -> None:
    """As Lightning's bf16-true and DeepSpeed do; a model that is loaded in bf16 has them of itself."""
    messages: list[Message] = [said.optimizer(7, num_parameters={"bfloat16": 9}), said.step(7, 1), said.step(7, 2)]
    if stated is not None:
        known: dict[str, Any] = {"arguments": {"precision": "precision"}, "parser": "", "script": ""}
        messages.append(Switch(pid=7, time=0.0, owner="Trainer", today=stated, **known))
    (rank,) = said.heard(messages).ranks.values()
    assert todays_precision(rank) == precision
