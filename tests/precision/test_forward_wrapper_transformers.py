"""Every module of real transformers, pinned in turn under half precision: loss and gradients stay finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune_amp.core.dimensions import Precision
from autotune_amp.precision.forward_wrapper import Observer, observe, override, pin_fp32, unpin
from autotune_amp.precision.torch_state import autocast

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(12).view(2, 6)


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config), {"input_ids": TOKENS, "labels": TOKENS}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **sizes))
    return model, {"input_ids": TOKENS, "labels": TOKENS}


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)  # the same dropout each time
    model.zero_grad()
    loss: Tensor = model(**inputs).loss
    loss.backward()  # type: ignore[no-untyped-call] # torch has no type for it
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    return loss.detach()


@pytest.mark.parametrize(("make", "precision"), [(gpt2, "bf16"), (t5, "fp16")])
def test_every_module_can_be_pinned_overridden_and_observed(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], precision: Precision
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    exact = loss_of(model, inputs)
    put_out: list[torch.dtype] = []

    def record(_: nn.Module, __: object, output: Any) -> None:
        if isinstance(output, Tensor):
            put_out.append(output.dtype)

    modules = list(model.modules())
    with autocast(precision, "cpu"):
        for module in modules:
            pin_fp32(module, "cpu")
            handle = module.register_forward_hook(record)
            torch.testing.assert_close(loss_of(model, inputs), exact, rtol=0.05, atol=0.05)
            handle.remove()
            unpin(module)
    assert len(put_out) > 8
    assert set(put_out) == {torch.float32}
    observer = Observer(len(modules), "cpu")
    observer.is_sampling = True
    for slot, module in enumerate(modules):
        observe(module, observer, slot)
    override(model, precision, "cpu")
    assert not torch.equal(loss_of(model, inputs), exact)
    pin_fp32(model, "cpu")
    with autocast(precision, "cpu"):
        torch.testing.assert_close(loss_of(model, inputs), exact, rtol=1e-5, atol=1e-6)
    assert observer.read().isfinite().all()
    assert (observer.read() > 0).sum() > 8
