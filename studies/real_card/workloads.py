"""A training at the size in which people run it, in plain PyTorch, and as autotune_amp takes it. The data are made.

`PARTS` is what a hand-written training needs; `workloads.py:gpt2` is the Workload.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn
from torch.utils.data import DataLoader

from autotune_amp import Workload

sys.path.insert(0, str(Path(__file__).parent.parent / "landscapes"))
from parts import Part, adamw, of_transformers, tokens

LENGTH, NUM_TOKENS = 512, 50257


def make_gpt2() -> nn.Module:
    """GPT-2 small, 124 million parameters, with torch's fused attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=NUM_TOKENS, n_positions=LENGTH, **none))


PARTS = {
    "gpt2": Part(make_gpt2, of_transformers, lambda: tokens(4096, LENGTH, NUM_TOKENS), adamw, 8, ()),
}


def gpt2() -> Workload:
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401 # a script imports it once, not in every trial

    part = PARTS["gpt2"]
    return Workload(
        model=part.model,
        loss=part.loss,
        data=DataLoader(part.data(), batch_size=part.todays_batch_size, shuffle=True, drop_last=True),
        optimizer=part.optimizer,
        name="gpt2",
    )
