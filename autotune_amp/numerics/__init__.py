"""Numerical checks: a precision compared with fp32, gradient accumulation, and the loss scale from measured gradients.

A search checks every precision that it may recommend. To check a single precision:

```python
import torch
from transformers import T5Config, T5ForConditionalGeneration
from autotune_amp import Workload, check_fidelity

def model():
    config = T5Config(vocab_size=64, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    t5 = T5ForConditionalGeneration(config)
    with torch.no_grad():  # as in large T5 checkpoints, whose feed-forward outputs exceed 65504
        t5.encoder.block[1].layer[1].DenseReluDense.wo.weight.mul_(1e6)
    return t5

def batch(size):
    tokens = torch.randint(64, (size, 16))
    return {"input_ids": tokens, "labels": tokens}

workload = Workload(model, lambda model, batch: model(**batch).loss, batch, torch.optim.AdamW)
fidelity = check_fidelity(workload, "fp16")
print(fidelity.verdict, fidelity.healing_pins)
```

The check runs the same weights, batches and dropout masks in fp32 and in the precision, in a process of its own, and
takes as long as about 40 training steps. The verdict is *faithful*, *undecided*, *doubtful*, *unfaithful* or
*unchecked*, with the measurements, the modules responsible and the next step. Here fp16 is *unfaithful*, and faithful
if that `wo` runs in fp32 (`AmpConfig(pinned_modules=...)`). `studies/fidelity` lists the workloads on which the
verdicts were tested, including those that were wrong.
"""
