"""How updates are counted, apart from any training."""

from __future__ import annotations

import math

import torch

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.runtime.metrics import MetricsRecorder
from autotune_amp.runtime.policy import Policy
from autotune_amp.runtime.scaler import BAD_LOSS, CLEAN, LossScaler, Ranks, UpdateResult


def test_only_the_bad_batches_of_the_same_burst_are_explained_by_an_overflow() -> None:
    policy = Policy(["fp16"])
    config = AmpConfig(precision="fp16", batch_size=1, loss_scale=LossScale())
    ranks = Ranks(torch.device("cpu"))
    recorder = MetricsRecorder(config, policy, LossScaler(policy.scale), ranks, sinks=(), run_log=None)
    for verdict, is_overflow in [(BAD_LOSS, False), (CLEAN, False), (BAD_LOSS, False), (BAD_LOSS, True)]:
        recorder.begin_update(UpdateResult({0: verdict}, math.nan), is_overflow=is_overflow)
    assert (recorder.totals.num_bad_batches, recorder.totals.num_overflows) == (1, 2)
