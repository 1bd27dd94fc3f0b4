"""Code that runs in the training loop: the controller, its policy and its diagnosis.

`train_step` runs zero_grad, the closure under autocast, backward, unscale, clip, step and update, with bit-identical
results. The closure computes the loss and nothing else: if steps fail it is called again to find the cause. Inside
`for batch, is_last in controller.windows(loader)` a call is one pass of an accumulation window, and its share of the
loss is taken for you. A list of optimizers is stepped one by one.

```python
import torch
from torch import nn
from autotune_amp import AmpConfig, PrecisionController
from autotune_amp.integrations.sinks import tensorboard  # http, wandb, mlflow, opentelemetry

x, y = torch.randn(2048, 64), torch.randint(10, (2048,))
dataset = torch.utils.data.TensorDataset(x, y)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer, loss_fn = torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss()

config = AmpConfig(precision="bf16", batch_size=32, fallback=["fp32"])
sinks = [tensorboard("runs/1"), print]  # or any callable
controller = PrecisionController(config, device="cpu", run_log="run.jsonl", sinks=sinks)
for inputs, targets in torch.utils.data.DataLoader(dataset, batch_size=32):
    stepped = controller.train_step(lambda: loss_fn(model(inputs), targets), optimizer)
controller.detach()  # waits for the sinks
print(bool(stepped), stepped.loss, stepped.grad_norm, controller.status().history)
```

In an existing loop the controller replaces GradScaler, and its `autocast()` replaces torch's. It *is* a
`torch.amp.GradScaler`, and as long as nothing fails the weights are identical bit for bit:

```python
import torch
from torch import nn
from autotune_amp import AmpConfig, LossScale, PrecisionController

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = [(torch.randn(32, 64), torch.randint(10, (32,)))] * 8
config = AmpConfig(precision="fp16", batch_size=32, loss_scale=LossScale(), fallback=["bf16", "fp32"])
controller = PrecisionController(config, device="cpu")
# Optional: allows to diagnose failures, to undo BatchNorm's statistics and to pin modules.
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

It adds:

* **It tells overflow from bad data.** A step whose *loss* is not finite is skipped without lowering the scale. When
  steps fail repeatedly, the batch is rerun in fp32 without a step. If it is not finite there either, precision is not
  the cause: the message names the input, parameter or module where it begins, and after ten such steps the run stops
  with `NotPrecisionError` (`halt=False`: it goes on skipping). If it is finite there, the modules at fault are pinned
  in fp32 if they are few; else the precision is stepped down to the first fallback in which the batch is finite. If
  the loss has grown to several times its best, above where it began, the run diverges, and precision is not the cause
  either. Without `rerun`, or if rerunning fails or does not show the cause, it steps down on trial, and goes back and
  stops if that did not help; a burst of two to four bad batches then looks like precision, so give it a `rerun`.
* **A backend of attention at fault** is told from the precision: before anything else the batch is rerun without
  FlashAttention, cuDNN and memory-efficient attention. If it is finite without one of them (cuDNN's backward pass can
  give NaN in bf16), that backend is switched off for the rest of the run, and the precision stays. Needs `rerun`.
* **Silent underflow** is noticed without any NaN: the scale is raised first, then the precision stepped down.
* **bf16 and fp32 are guarded too**: a step that is not finite is skipped (`guard=False` leaves them alone), and
  BatchNorm's running statistics of a skipped step are undone (with `attach`).
* **Fallbacks of a recommendation carry measured plans.** A fallback is taken only if its memory fits; its batch size
  and accumulation steps are then in `controller.config`, and `for batch, is_last in controller.windows(loader)`
  follows them: it yields the passes of each accumulation window (divide the loss by `controller.window_size`),
  splitting the loader's batches; another loop ends there, with a `DemotedError` that has the config. For a mean over
  tokens: `windows(loader, weigh=lambda batch: (batch["labels"] != -100).sum())`, and the loss times
  `controller.window_share`. Fallbacks named in a config written by hand are taken without such a check.
* **Code with its own `autocast(float16)`** can be stepped down through `attach(model)`: give it the module that your
  autocast wraps and your loop calls. The next window checks whether its layers run in the new precision; if not, the
  controller goes back and reports it. With neither `attach` nor `controller.autocast()` the controller only scales,
  guards and advises, and reports that at the first step; if ten steps in a row fail it stops with `NoRungFitsError`,
  which names the lines to change. A copy of the model, such as an EMA, does not follow later moves.
* **Flags.** It sets the process's TF32 flags to those of the precision, as the trials of a workload do; a config *as
  found* (`config.as_found`: your own flags were measured and recommended), and that of a command's recommendation,
  keeps yours until it steps down.
* **Checkpoints** hold all of it: `state_dict()` has GradScaler's keys on top, loads a plain GradScaler's state, and
  can be loaded with `torch.load(weights_only=True)`.
* **Several ranks decide alike**: they agree on whether a step is finite before any of them steps (DDP, FSDP, fused or
  not).
* **When a job is ended** (SIGTERM, by Slurm, Kubernetes or torchrun), `PrecisionController(config, on_signal=save)`,
  on every rank, calls `save` inside `update()` at the end of the accumulation window, on all ranks at the same one:
  save a checkpoint there and `sys.exit(143)`. Step schedulers and counters before `update()`, and call `detach()`
  when the training run is over. Slurm signals DataLoader workers too, which then die in the middle of the window: give
  the loader `worker_init_fn=lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN)`; they end with the training run.
* By hand: `set_precision("bf16")`, `disable()`, `enable()`, at the end of the accumulation window;
  `validation(precision="fp32")`.

`status()` returns the state of the run: precision, loss scale with its growths and backoffs, steps and skips
(*overflows* and *bad batches* apart), the share and number of gradient entries that fp16 flushed (estimated from
samples), seconds and steps by precision, memory saved compared with the fp32 fallback's plan, the device's support of
each precision, the GPU's temperature, clock, power and throttling (read by a thread every five seconds, with a warning
at each beginning of throttling), the epoch (`controller.epoch(n)`), every move with its reason. `reset_stats()`
restarts the counts, `save_stats(path)` writes them. The logger `autotune_amp.runtime` writes a line at the start and
one for each move (`logging.basicConfig(level=logging.INFO)` shows them), and at DEBUG each change of the loss scale
with its cause.
"""
