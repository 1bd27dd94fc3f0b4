"""Where the time of a training step goes: torch.profiler's trace taken apart, and what may gain by it.

```python
import torch
from torch import nn
from autotune_amp import Workload, profile_amp

workload = Workload(
    model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    data=lambda size: (torch.randn(size, 64), torch.randint(10, (size,))),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
)
found = profile_amp(workload, num_batches=20, batch_size=32)
print(found.best_precision, found.speedup, found.verdict, found.next_step)
```

The quick question, without a search: fp32 against bf16 and fp16 (and TF32 where a GPU has it) on the same batches in
turn, with step time, speed-up and its interval, memory, and a verdict; then where a step's time goes, from the
machine's measured matrix rate down to what was attained, and what to try next, in the words of a search, which tries
it: of the best low precision where that is faster than fp32, else of fp32. Its parts are medians over several
profiled steps, shown with the least and the largest share, and only a part that is large in all of them is advised
on. The steps that are timed are divided among three fresh processes, whose spread the interval rests on. Nothing of
yours is changed.
"""
