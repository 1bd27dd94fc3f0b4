"""Numerical truth: a precision against fp32, and the loss scale from measured gradients.

A search holds what it may recommend against fp32. On its own:

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

It runs the same weights, batches and dropout draws in both, in a process of its own, for about the price of 40
training steps, and says *faithful*, *undecided*, *doubtful*, *unfaithful* or *unchecked*, with the numbers, the modules
to blame and what to do: here *unfaithful*, and that it is faithful with that `wo` in fp32
(`AmpConfig(pinned_modules=...)`). On which workloads the verdicts were tried, and which it missed, is in
`studies/fidelity`.
"""
