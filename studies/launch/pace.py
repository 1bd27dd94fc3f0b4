"""Run a script as it is and time it without autotune_amp: `python pace.py SCRIPT …` or `pace.py -m MODULE …`.

A hook of torch on every optimizer's step takes the time, of the optimizer that steps least. It is taken from step FIRST
on, or from the first step after WARM_UP_SECONDS, until step LAST, for SECONDS, or until the script ends. The process
then writes what it saw to the file that PACE names, and ends. Of several ranks, rank 0 writes.
"""

import atexit
import json
import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

FIRST, LAST = 50, 300
WARM_UP_SECONDS, SECONDS = 15, 20
times = {}  # of the steps, by optimizer


def stepped(optimizer, *_):
    times.setdefault(id(optimizer), []).append(time.perf_counter())
    least = min(times.values(), key=len)
    if len(least) == LAST or (len(least) > 1 and least[-1] - least[first(least)] > SECONDS):
        write()
        sys.stdout.flush()
        os._exit(0)


def first(least):
    """Return the index of the step from which on the time is taken."""
    warm = (number for number, at in enumerate(least) if number + 1 == FIRST or at - least[0] > WARM_UP_SECONDS)
    return next(warm, len(least) - 1)


def write():
    least = min(times.values(), key=len, default=[])
    begin = first(least) if least else 0
    if os.environ.get("RANK", "0") == "0" and len(least) - begin > 1:
        measured = {"num_steps": len(least) - 1 - begin, "seconds": least[-1] - least[begin]}
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        Path(os.environ["PACE"]).write_text(json.dumps({**measured, "num_ranks": num_ranks}))


if __name__ == "__main__":
    register_optimizer_step_post_hook(stepped)
    atexit.register(write)
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
