"""Small transformers on a CUDA device: a trial in every precision, and the check of fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune_amp import LossScale, Workload
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.trial import checks
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.timing import time_steps
from autotune_amp.trial.training import make_training

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

Batch = dict[str, Tensor]
VOCABULARY, NUM_TOKENS = 64, 16
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


def tokens(size: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (size, NUM_TOKENS))


def text(size: int) -> Batch:
    ids = tokens(size)
    return {"input_ids": ids, "labels": ids}


def gpt2() -> tuple[nn.Module, Callable[[int], Batch]]:
    special = {"bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": VOCABULARY, "n_positions": NUM_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **special)), text


def whisper() -> tuple[nn.Module, Callable[[int], Batch]]:
    both = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in both.items()}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, num_mel_bins=8, max_source_positions=32, max_target_positions=NUM_TOKENS,
        suppress_tokens=None, begin_suppress_tokens=None, **sizes, **special,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), lambda size: {
        "input_features": torch.randn(size, 8, 64),
        "labels": tokens(size),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = model(**batch).loss
    return result


@pytest.mark.parametrize("make", [gpt2, whisper])
def test_a_transformer_trains_in_every_precision_and_is_checked(make: Any) -> None:
    torch.manual_seed(0)
    model, data = make()
    workload = Workload(model, loss, data, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    common: dict[str, Any] = {"device": "cuda", "torch_state": torch_state.capture()}
    context = Context(workload, is_kept=False)
    for precision in PRECISIONS:
        spec = Trial(
            candidate=Setting(precision=precision, batch_size=8),
            loss_scale=LossScale() if precision == "fp16" else None,
            measure_seconds=0.0,
            **common,
        )
        training = make_training(context.workload, context.model(torch.device("cuda")), spec)
        timing = time_steps(training, lambda *_: None, lambda _: None)
        assert (timing.num_steps_together, len(timing.raw_step_seconds)) == (4, 1)
        assert 0 < timing.last_loss < 10
    found = checks.check(
        context, Check(what="fidelity", candidate=Setting(precision="fp16", batch_size=8), **common), lambda _: None
    )
    assert isinstance(found, Fidelity)
    assert found.verdict in ("faithful", "doubtful")  # draws differ between devices
