"""pytorch-autotune: autotune() on the user's model and one batch of today's size.

Its budget is looked at between trials alone, and one of fp16 takes minutes where a CPU emulates it: when the budget is
over it gets the Ctrl-C on which, by its README, it keeps the best so far.
"""

import json
import signal

from pytorch_autotune import autotune
from user import User, advise

PRECISIONS = {"fp32_default": "fp32", "tf32": "tf32", "amp_bf16": "bf16", "amp_fp16": "fp16"}
BUDGET_SECONDS = 120  # what "fast" stands for


def seek(user: User):
    batch, loss = user.example()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(BUDGET_SECONDS)
    result = autotune(
        user.model,
        batch,
        loss_fn=loss,
        optimizer=user.part.optimizer,
        budget="fast",
        device="cpu",
        cache=False,
    )
    signal.alarm(0)
    chosen = result.config
    setting = {
        "precision": PRECISIONS[chosen.precision],
        "batch_size": user.part.todays_batch_size,
        "accumulation_steps": 1,
        "compile": chosen.compile,
        "channels_last": chosen.channels_last,
    }
    return {"setting": setting, "report": json.loads(result.report.to_json())}


if __name__ == "__main__":
    advise(seek)
