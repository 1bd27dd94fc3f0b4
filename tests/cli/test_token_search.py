"""A search of a real Trainer's command for tokens, to its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Sentences of 4 to 24 tokens.
SCRIPT = """
import sys
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

torch.manual_seed(0)
lengths = torch.randint(4, 25, (4096,)).tolist()
rows = [{"input_ids": torch.randint(1, 64, (length,))} for length in lengths]

def padded(samples):
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = ids.masked_fill(ids == 0, -100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
Trainer(GPT2LMHeadModel(config), args, train_dataset=rows, data_collator=padded).train()
"""
ARGUMENTS = "--output_dir out --use_cpu --report_to none --save_strategy no --num_train_epochs 9 --disable_tqdm true"


@pytest.mark.slow
def test_a_trainers_tokens_operations_and_price_are_in_the_answer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    search = "search --json --quiet --trials 1 --budget 120 --objective tokens --price-per-hour 2 --precision fp32"
    command = [sys.executable, "train.py", *ARGUMENTS.split(), "--per_device_train_batch_size", "{batch_size=8}"]
    done = subprocess.run(
        [sys.executable, "-m", "autotune_amp", *search.split(), "--", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    evidence = found["evidence"]
    assert 4 <= evidence["tokens_per_second"] / evidence["samples_per_second"] <= 24
    assert 0 < evidence["padded_share"] < 1
    assert found["objective"] == "tokens"
    assert found["unit_price"]["unit"] == "tokens"
    assert found["unit_price"]["price"] == pytest.approx(2e6 / 3600 / evidence["tokens_per_second"])
    counted = found["workload"]["counted_flops"]
    assert counted["num_samples"] == 8
    assert 8 * 4 <= counted["num_positions"] <= 8 * 24
    # Every weight but those of the embeddings multiplies and adds once forward and twice back; attention comes on top.
    weights = 16 * 48 + 16 * 16 + 2 * 16 * 64 + 16 * 64
    assert 6 * weights <= counted["flops"] / counted["num_positions"] <= 9 * weights
    assert 0 < found["utilization"]["mfu"] < 1
