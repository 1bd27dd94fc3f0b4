"""Numerical checks: a precision compared with fp32, gradient accumulation, and the loss scale from measured gradients.

A search checks every precision that it may recommend. To check one alone:

```python
import torch
from transformers import T5Config, T5ForConditionalGeneration
from autotune_amp import Workload, check_fidelity

def model():
    config = T5Config(vocab_size=64, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    t5 = T5ForConditionalGeneration(config)
    with torch.no_grad():  # as in large T5 checkpoints, whose feed-forward layers put out numbers past 65504
        t5.encoder.block[1].layer[1].DenseReluDense.wo.weight.mul_(1e6)
    return t5

def batch(size):
    tokens = torch.randint(64, (size, 16))
    return {"input_ids": tokens, "labels": tokens}

workload = Workload(model, lambda model, batch: model(**batch).loss, batch, torch.optim.AdamW)
found = check_fidelity(workload, "fp16")
print(found.verdict, found.healing_pins)
```

The check runs the same weights, batches and dropout masks in both precisions, in a process of its own, and costs about
40 training steps. The verdict is *faithful*, *undecided*, *doubtful*, *unfaithful* or *unchecked*, with the numbers,
the modules responsible and the next step: here *unfaithful*, and faithful with that `wo` in fp32
(`AmpConfig(pinned_modules=...)`). `studies/fidelity` lists the workloads on which the verdicts were tested, including
the wrong ones.
"""
