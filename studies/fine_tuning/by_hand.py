"""Time a training without autotune_amp: `python by_hand.py SCRIPT …` or `by_hand.py -m MODULE …`.

A hook of torch on each optimizer step takes the time, and the Trainer's `training_step` is wrapped to count samples and
unpadded tokens. After the step LAST the process writes the rates between FIRST and LAST to the file that the variable
BY_HAND names, and ends.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import Trainer

FIRST, LAST = 10, 60
times, counts = [], {"samples": [], "tokens": []}
num_samples = num_tokens = 0
training_step = Trainer.training_step


def counting_step(trainer, model, inputs, *args, **kwargs):
    global num_samples, num_tokens
    mask = inputs.get("attention_mask")
    num_samples += len(inputs["input_ids"])
    num_tokens += inputs["input_ids"].numel() if mask is None else int(mask.sum())
    return training_step(trainer, model, inputs, *args, **kwargs)


def stepped(*_):
    times.append(time.perf_counter())
    counts["samples"].append(num_samples)
    counts["tokens"].append(num_tokens)
    if len(times) == LAST:
        seconds = times[-1] - times[FIRST - 1]
        rates = {f"{name}_per_second": (each[-1] - each[FIRST - 1]) / seconds for name, each in counts.items()}
        Path(os.environ["BY_HAND"]).write_text(json.dumps({**rates, "num_steps": LAST - FIRST, "seconds": seconds}))
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    Trainer.training_step = counting_step
    register_optimizer_step_post_hook(stepped)
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
