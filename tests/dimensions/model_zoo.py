"""Small models of five kinds, two of them with dropout, each with a loss, data and an optimizer as its users have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune_amp import AmpConfig, Workload, prepare
from autotune_amp.core.setting import Setting
from autotune_amp.precision.torch_state import autocast
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.training import make_training

NUM_CLASSES, VOCABULARY = 4, 50


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.relu(self.norm(self.conv(x)))


def convnet() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3, stride=2), *(Block(8) for _ in range(2))]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, NUM_CLASSES))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        head: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return head


def gpt2(num_blocks: int = 2) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_layer=num_blocks, bos_token_id=0, eos_token_id=0))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    sizes |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "image_size": 16, "patch_size": 4, "num_labels": NUM_CLASSES}
    return ViTForImageClassification(ViTConfig(**sizes))


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 16, 16), torch.randint(0, NUM_CLASSES, (size,))


def tokens(size: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(1, VOCABULARY, (size, 12))
    return drawn, drawn.roll(-1, 1)


def classified(model: Any, batch: Any) -> Tensor:
    out = model(batch[0])
    return functional.cross_entropy(getattr(out, "logits", out), batch[1])


def predicted(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def own_loss(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
    return loss


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor], Callable[[int], Any]]] = {
    "convnet": (convnet, classified, images),
    "gpt2": (gpt2, own_loss, tokens),
    "t5": (t5, own_loss, tokens),
    "vit": (vit, classified, images),
    "lstm": (Recurrent, predicted, tokens),
}


def workload(name: str, make_model: Callable[[], nn.Module] | None = None) -> Workload:
    usual, loss, make_batch = ZOO[name]
    return Workload(make_model or usual, loss, make_batch, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))


convnet_workload, vit_workload, lstm_workload = (partial(workload, name) for name in ("convnet", "vit", "lstm"))
gpt2_workload = partial(workload, "gpt2", partial(gpt2, 1))  # compiled, where each block takes seconds


def assert_trains_as_prepared(name: str, setting: Setting) -> nn.Module:
    """A trial trains bit for bit what `prepare` sets up for a loop by hand, whose model is returned."""
    torch.manual_seed(0)
    make_model, loss, make_batch = ZOO[name]
    model = make_model()
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-3)
    prepare(AmpConfig.of(setting), by_hand, optimizer)
    batches = [make_batch(4) for _ in range(3)]
    given = Workload(model, loss, lambda _: iter(batches), lambda p: torch.optim.AdamW(p, lr=1e-3))
    training = make_training(given, model, Trial(candidate=setting, device="cpu"))
    for batch in batches:
        torch.manual_seed(7)
        training.forward_backward(training.next_batch())
        training.update()
        torch.manual_seed(7)
        with autocast(setting.precision, "cpu"):
            by_hand_loss = loss(by_hand, batch)
        torch.autograd.backward(by_hand_loss)
        optimizer.step()
        optimizer.zero_grad()
    training.close()
    torch.testing.assert_close(model.state_dict(), by_hand.state_dict(), rtol=0, atol=0)
    return by_hand
