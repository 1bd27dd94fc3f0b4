"""The part that lives in the training loop: the controller, its policy and its diagnosis.

`train_step` is zero_grad, the closure under autocast, backward, unscale, clip, step and update, bit for bit. The
closure computes the loss and nothing else: where steps fail it is called again to find out why. With `for batch,
is_last in controller.windows(loader)` around it a call is one pass of an accumulation window, and its part of the
loss is taken for you. A list of optimizers is stepped one by one.

In a loop that is there already, the controller takes GradScaler's place, and its `autocast()` that of torch's; it
*is* a `torch.amp.GradScaler`, and while nothing trips the weights are the same bit for bit:

```python
import torch
from torch import nn
from autotune_amp import AmpConfig, LossScale, PrecisionController

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = [(torch.randn(32, 64), torch.randint(10, (32,)))] * 8
config = AmpConfig(precision="fp16", batch_size=32, loss_scale=LossScale(), fallback=["bf16", "fp32"])
controller = PrecisionController(config, device="cpu")
# To diagnose what fails, undo BatchNorm's statistics and pin modules; it may be left out.
controller.attach(model, rerun=lambda: nn.functional.cross_entropy(model(inputs), targets))

for inputs, targets in loader:
    optimizer.zero_grad()
    with controller.autocast():
        loss = nn.functional.cross_entropy(model(inputs), targets)
    controller.backward(loss)  # or controller.scale(loss).backward()
    controller.unscale_(optimizer)  # only to clip
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    stepped = controller.step(optimizer)  # true if it stepped
    controller.update()
```

What it adds:

* **It tells overflow from bad data.** A step whose *loss* is not finite is skipped without lowering the scale. When
  steps fail repeatedly, the batch is rerun in fp32, no step taken. Not finite there either: it is not precision. The
  message names the input, parameter or module where it begins, and after ten such steps the run stops with
  `NotPrecisionError` (`halt=False`: it goes on skipping). Finite there: the modules at fault are pinned in fp32, if
  they are few; else the precision is stepped down to the first fallback in which the batch is finite. Where the loss
  has grown to several times its best, above where it began, the run diverges, and that is not precision's fault
  either. Without `rerun`, or where rerunning fails or does not show what is wrong, it steps down on trial, and goes
  back and stops where that did not help; a burst of two to four bad batches then looks like precision, so give it a
  `rerun`.
* **Silent underflow** is noticed without any NaN: the scale is raised first, then the precision stepped down.
* **bf16 and fp32 are guarded too**: a step that is not finite is skipped, not taken (`guard=False` leaves them
  alone), and BatchNorm's running statistics of a skipped step are undone (with `attach`).
* **Fallbacks of a recommendation carry measured plans.** One is taken only if its memory fits; its batch size and
  accumulation are then in `controller.config`, and `for batch, is_last in controller.windows(loader)` takes them up:
  it yields the passes of each accumulation window (divide the loss by `controller.window_size`), splitting the
  loader's batches. For a mean over tokens: `windows(loader, weigh=lambda batch: (batch["labels"] != -100).sum())`,
  and the loss times `controller.window_share`. Names in a config written by hand are taken at their word.
* **Code with its own `autocast(float16)`** can be stepped down through `attach(model)`: give it the module that your
  autocast wraps and your loop calls. Whether its layers then run in the new precision is looked at in the next
  window; if not, it goes back and says so. With neither `attach` nor `controller.autocast()` the controller only
  scales, guards and advises, and says so at the first step; where ten steps in a row fail it stops with
  `NoRungFitsError`, which names the lines to change. A copy of the model, an EMA for one, does not follow
  later moves.
* **Flags.** It sets the process's TF32 flags to what the precision means, as the search's trials do; a config *as
  found* (`config.as_found`: today's own flags were measured and recommended) keeps yours until it steps down.
* **Checkpoints** hold all of it: `state_dict()` has GradScaler's keys on top, loads a plain GradScaler's state, and
  passes `torch.load(weights_only=True)`.
* **Several ranks decide alike**: whether a step is finite is agreed on before anybody steps (DDP, FSDP, fused or
  not).
* **When a job is ended** (SIGTERM, by Slurm, Kubernetes or torchrun), `PrecisionController(config, on_signal=save)`,
  on every rank, calls `save` inside `update()` at the end of the accumulation window, on all ranks at the same one:
  save a checkpoint there and `sys.exit(143)`. Step schedulers and counters before `update()`, and call `detach()`
  when the training is over. Slurm signals DataLoader workers too, which then die in the middle of the window: give
  the loader `worker_init_fn=lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN)`; they end with the training.
* By hand: `set_precision("bf16")`, `disable()`, `enable()`, at the end of the accumulation window;
  `validation(precision="fp32")`.

`status()` says where the run stands: precision, loss scale and growth tracker, steps and skips (*overflows* and *bad
batches* apart), the share of gradient entries that fp16 flushed, seconds and steps by precision, memory saved
against the fp32 fallback's plan, the epoch (`controller.epoch(n)`), every move with its reason. `reset_stats()`
counts anew, `save_stats(path)` writes it. The logger `autotune_amp.runtime` has a line at the start and one for each
move (`logging.basicConfig(level=logging.INFO)` shows them), and at DEBUG each change of the loss scale with its
cause, and a card's temperature and clock.
"""
