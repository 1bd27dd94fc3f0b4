"""Three trainings at the size in which people run them, in plain PyTorch, and as autotune_amp takes them.

`PARTS` is what a hand-written training needs; `workloads.py:gpt2` and so on are the Workloads. The data are made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from autotune_amp import Workload

sys.path.insert(0, str(Path(__file__).parent.parent / "landscapes"))
from parts import Part, adamw, classify, images, of_transformers, sgd, tokens, vectors

LENGTH, NUM_TOKENS = 512, 50257


def make_gpt2() -> nn.Module:
    """GPT-2 small, 124 million parameters, with torch's fused attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=NUM_TOKENS, n_positions=LENGTH, **none))


def make_resnet50() -> nn.Module:
    from torchvision.models import resnet50

    model: nn.Module = resnet50()
    return model


def make_mlp() -> nn.Module:
    """Four layers 1024 wide: a step is bound by the launches of its kernels."""
    widths = [784, 1024, 1024, 1024]
    hidden: list[nn.Module] = []
    for num_in, num_out in pairwise(widths):
        hidden += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 10))


PARTS = {
    "gpt2": Part(make_gpt2, of_transformers, lambda: tokens(4096, LENGTH, NUM_TOKENS), adamw, 8, ()),
    "resnet50": Part(make_resnet50, classify, lambda: images(1024, 224), sgd, 32, ()),
    "mlp": Part(make_mlp, classify, lambda: vectors(65536), adamw, 64, ()),
}


def make(name: str) -> Workload:
    part = PARTS[name]
    if name == "gpt2":
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401 # a script imports it once, not in every trial
    if name == "resnet50":
        import torchvision  # noqa: F401 # as above
    return Workload(
        model=part.model,
        loss=part.loss,
        data=DataLoader(part.data(), batch_size=part.todays_batch_size, shuffle=True, drop_last=True),
        optimizer=part.optimizer,
        name=name,
    )


def _factory(name: str) -> Callable[[], Any]:
    return lambda: make(name)


gpt2, resnet50, mlp = map(_factory, ("gpt2", "resnet50", "mlp"))
