"""Profile of a training step: mixed precision against fp32, the step's time by kind of operation, and possible gains.

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

A quick answer without a search: fp32 is compared with bf16 and fp16 (and TF32 on a GPU that has it) on the same batches
in turn, with step time, speed-up and its interval, memory, and a verdict. Then the step's time is divided into parts,
from the machine's measured matrix rate down to the rate attained, with the next steps to try, which a search tries
too. The step is that of the best low precision if it is faster than fp32, otherwise that of fp32. Parts are medians
over several profiled steps, shown with the smallest and the largest share, and advice is given only on parts that are
large in all of them. The timed steps are divided among three fresh processes, whose spread gives the interval. None
of your objects is changed.
"""
