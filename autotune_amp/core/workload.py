"""Workload: what is trained, and loading it from "package.module:function" or "path/file.py:function".

A loop of its own:

```python
import copy
import torch
from torch import nn
from autotune_amp import Workload, recommend_config

images = torch.utils.data.TensorDataset(torch.randn(2048, 64))

def build():  # everything that the training needs, in any container
    model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64))
    return {"model": model, "average": copy.deepcopy(model), "optimizer": torch.optim.AdamW(model.parameters())}

def train_step(state, batch, amp):  # as it is written with a PrecisionController
    (images,) = batch
    noise = torch.randn_like(images)
    state["optimizer"].zero_grad()
    with amp.autocast():
        loss = nn.functional.mse_loss(state["model"](images + noise), noise)
    amp.backward(loss)
    amp.unscale_(state["optimizer"])
    nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
    amp.step(state["optimizer"])
    amp.update()
    for slow, fast in zip(state["average"].parameters(), state["model"].parameters()):
        slow.data.lerp_(fast.data, 0.01)

workload = Workload(
    build=build, train_step=train_step, data=torch.utils.data.DataLoader(images, batch_size=32, shuffle=True)
)
recommendation = recommend_config(workload, budget=60)
print(recommendation.config.precision, recommendation.config.batch_size)
```

* **Loops of their own** (a GAN, a diffusion model): `build` and `train_step` in place of model, loss and optimizer.
  Build on the CPU: what `build` returns is moved to the device. The loop is held against fp32 like any other
  training; accumulation is not offered, since it takes its own steps. Several optimizers alone need no loop:
  `optimizer=` may return them in a list.
* **Accumulation** is offered only where it learns the same: on your own samples, the gradients of the micro-batches
  must add up to that of the whole. With BatchNorm, in-batch negatives, or a queue or codebook that each forward pass
  changes they do not, and it says so. Where the loss is a mean over tokens, of which micro-batches hold unequal
  shares, they do with the right weights, and it says which. Samples that hold unequal shares are picked on purpose,
  out of up to 2,048 that a second's look through the dataset finds; of a stream, whose samples cannot be picked, the
  first batch is judged.
* **Lengths that vary**: memory is measured on the largest samples found in a second or two of looking through the
  dataset, sized as `collate_fn` makes each alone, or on `Workload(worst_batch=...)`. The speed is that of batches
  from all over an epoch of your own sampler, from the same places for every candidate; a stream's come in its own
  order. `evaluate=` and `checkpoint=` are run once for each candidate that is confirmed, within a tenth of the
  budget, so that the memory holds for them too; what raises or takes longer is said and speaks against nobody.
* **A loader that sets the speed** is found out, with what the step alone would reach; numbers of workers are tried.
* **Under torchrun** (or any launcher that sets torch's `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`), and
  under Slurm's plain `srun`, call `recommend_config()` on every rank, before or after `init_process_group()`: rank 0
  searches, the others wait for its answer. Your batch size is per rank, `--effective-batch-size` of all. Trials see
  nothing of the launcher: where your code reads `LOCAL_RANK`, give it a default. A live model may be inside
  DistributedDataParallel, which trials leave out; of FSDP pass the bare model.
* **Models that take long to build** are built once and shared by the trials; the confirmation's processes build
  their own. **Compiled models**: compiling is kept out of the step time, and the compiler's cache is shared. A live
  model that `model.compile()` compiled in place is refused: call that where the model is made, or pass
  `torch.compile(model)`.

On a CPU the peak memory is the highest of the confirmation's processes, without that of loader workers. How far it
held over longer trainings is in `studies/truth`, the rest for six trainings in `studies/real_training`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune_amp.core.errors import WorkloadError

if TYPE_CHECKING:
    from autotune_amp.core.config import LossScale
    from autotune_amp.core.dimensions import Precision
    from autotune_amp.core.setting import Setting


class Fitting(NamedTuple):
    """What ``Workload(fit=...)`` is called with, in a process of the confirmation.

    `model` is on its device, `optimizer` over its parameters, and `data` are batches of the setting's size: a
    DataLoader, or another iterable where there is none. `scaler` is a GradScaler with `loss_scale`, None where the
    setting takes none. ``stepped(loss, num_batches)`` is to be called after each optimizer step, with the batches that
    it was taken on; it raises once enough was measured, which `fit` is to let through.
    """

    model: Any
    optimizer: Any
    data: Any
    setting: Setting
    loss_scale: LossScale | None
    scaler: Any
    stepped: Callable[[Any, int], None]


class Workload:
    """What a training step is made of. Nothing given here is ever changed: trials run on copies in other processes.

    Either a model, a loss and an optimizer:

    model       an ``nn.Module``, or a function without arguments that makes one
    loss        ``loss(model, batch) -> Tensor``: runs the model on one batch and returns a scalar
    optimizer   a class or function of the parameters that makes an optimizer, or several in a list; or an optimizer
                instance (or a list of them) whose class and hyperparameters are taken, a learning rate that its
                scheduler holds below a tenth of its peak as that tenth; ``torch.optim.AdamW`` with its defaults if
                left out

    Or a loop of its own (a GAN, a diffusion model with its EMA):

    build       ``build() -> state``: everything that training needs, models and optimizers in any container
    train_step  ``train_step(state, batch, amp)``: one training step with all its optimizers, written with `amp` as it
                would be with a `PrecisionController`: ``amp.autocast()``, ``amp.backward(loss)``,
                ``amp.step(optimizer)``, ``amp.update()``

    And for both:

    data        a Dataset; a DataLoader, whose batch size and settings become the baseline; or a function of the batch
                size that returns one batch of so many samples, or a loader (a DataLoader or an iterator) of such
                batches
    name        the study's name; letters, digits, '.', '_' and '-'
    worst_batch ``worst_batch(batch_size) -> batch``: the one that takes the most memory, where batches differ; found by
                a look through the dataset if left out
    evaluate    ``evaluate(model)``, or ``evaluate(state)`` of a loop: an evaluation pass as the training has them
    checkpoint  ``checkpoint(model, optimizer, folder)``, or ``checkpoint(state, folder)`` of a loop: writes one

    accumulation_steps, precision: what the training runs today where the data and torch's own flags do not say it: the
                passes behind an optimizer step, and the precision that it will turn on by itself
    weighs_passes: whether the training itself weighs the passes of a step by what their losses divide by
    clip        ``clip(model)``: called before each optimizer step, on gradients without a loss scale
    schedule    ``schedule(optimizer)``: what makes the learning rate's schedulers, in a list, stepped after each step
    fit         ``fit(fitting)``: trains by a framework's own loop, of which `trainer` is the name; what is promised is
                measured in its steps. See `Fitting`.

    Evaluation and checkpoint are run where a recommendation is confirmed, so that its memory holds for a whole
    training. Raises `WorkloadError` for what cannot be any of these.
    """

    def __init__(
        self,
        model: Any = None,
        loss: Callable[[Any, Any], Any] | None = None,
        data: Any = None,
        optimizer: Any = None,
        name: str = "workload",
        *,
        build: Callable[[], Any] | None = None,
        train_step: Callable[[Any, Any, Any], Any] | None = None,
        worst_batch: Callable[[int], Any] | None = None,
        evaluate: Callable[[Any], Any] | None = None,
        checkpoint: Callable[..., Any] | None = None,
        accumulation_steps: int = 1,
        precision: Precision | None = None,
        weighs_passes: bool = False,
        clip: Callable[[Any], Any] | None = None,
        schedule: Callable[[Any], Any] | None = None,
        fit: Callable[[Fitting], None] | None = None,
        trainer: str | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.data = data
        self.optimizer = optimizer
        self.name = name
        self.build = build
        self.train_step = train_step
        self.worst_batch = worst_batch
        self.evaluate = evaluate
        self.checkpoint = checkpoint
        self.accumulation_steps = accumulation_steps
        self.precision = precision
        self.weighs_passes = weighs_passes
        self.clip = clip
        self.schedule = schedule
        self.fit = fit
        self.trainer = trainer
        self._check_parts()
        self._check_today()

    @classmethod
    def from_trainer(cls, trainer: Any) -> Workload:
        """What a ``transformers.Trainer`` trains: its model, loader, optimizer, ``training_step``, clipping, schedule.

        Today's batch size, accumulation and mixed precision are those of its TrainingArguments. A trial's loss is
        normalised over a pass (``num_items_in_batch``) where the Trainer does so over all passes of a step.

        What is promised is measured in the steps of the Trainer's own ``train()``, with its callbacks and its logging.
        There it neither evaluates nor saves nor uploads; its ``report_to`` and early stopping are left out; it is
        stopped between two steps, so that nothing of its end is run. The schedule is that of its arguments over 10,000
        steps. The trainer is left as it was. Raises `WorkloadError` for one that trains under DeepSpeed or FSDP, has no
        train_dataset, has trained in mixed precision before, or is an AutotuneTrainer.
        """
        return _adapter("transformers")(trainer)

    @classmethod
    def from_lightning(cls, module: Any, data: Any, trainer: Any = None, **options: Any) -> Workload:
        """What ``trainer.fit(module, data)`` trains; see `autotune_amp.integrations.lightning_workload.workload`."""
        return _adapter("lightning")(module, data, trainer, **options)

    @property
    def is_loop(self) -> bool:
        """Whether it takes its training steps itself."""
        return self.build is not None or self.train_step is not None

    def _check_parts(self) -> None:
        loop = self.build, self.train_step
        parts = self.model, self.loss, self.optimizer, self.clip, self.schedule, self.fit
        if self.is_loop and (None in loop or any(part is not None for part in parts)):
            raise WorkloadError(
                "A Workload is either model, loss and optimizer, or both build and train_step.",
                "Give build=, train_step= and data= alone: build() makes the models and optimizers itself.",
            )
        given = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        are_optimizers = bool(given) and all(hasattr(optimizer, "param_groups") for optimizer in given)
        is_data = callable(self.data) or hasattr(self.data, "__getitem__") or hasattr(self.data, "__iter__")
        sgd = "`lambda parameters: torch.optim.SGD(parameters, lr=0.1)`"
        wanted = {
            "model": (self.is_loop or callable(self.model), "an nn.Module or a function, as `lambda: MyModel()`"),
            "loss": (self.is_loop or callable(self.loss), "a function, as `lambda model, batch: model(batch).loss`"),
            "optimizer": (
                self.optimizer is None or callable(self.optimizer) or are_optimizers,
                f"an optimizer or a function of the parameters, as {sgd}",
            ),
            "data": (
                is_data and not isinstance(self.data, Iterator),
                "a Dataset, a DataLoader or a function of the batch size; an iterator can be used only once",
            ),
        }
        for name in ("build", "train_step", "worst_batch", "evaluate", "checkpoint", "clip", "schedule", "fit"):
            wanted[name] = (getattr(self, name) is None or callable(getattr(self, name)), "a function")
        for name, (is_right, what) in wanted.items():
            if not is_right:
                kind = type_name(getattr(self, name))
                raise WorkloadError(f"Workload({name}=...) is a {kind}; it must be {what}.", f"Pass such a {name}.")

    def _check_today(self) -> None:
        steps = self.accumulation_steps
        if type(steps) is not int or steps < 1 or (self.is_loop and steps > 1):
            raise WorkloadError(
                f"Workload(accumulation_steps={steps!r}); it must be a whole number from 1 up, and 1 for a loop of its "
                "own, which takes its own optimizer steps.",
                "Leave accumulation_steps out, or pass the number of passes behind an optimizer step.",
            )
        if self.precision not in (None, "fp32", "tf32", "bf16", "fp16"):
            raise WorkloadError(
                f"Workload(precision={self.precision!r}); it must be fp32, tf32, bf16 or fp16.",
                "Leave precision out to have it read from torch's autocast and TF32 flags.",
            )


def _adapter(framework: str) -> Callable[..., Workload]:
    """The function of an adapter that makes workloads: adapters are plugins, of which this file knows no more."""
    module = importlib.import_module(f"autotune_amp.integrations.{framework}_workload")
    adapter: Callable[..., Workload] = module.workload
    return adapter


class OptimizersOfModel:
    """For ``Workload(optimizer=...)``: a function of the model, where the model itself makes its optimizers."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __call__(self, model: Any) -> Any:
        """The optimizers of this model."""
        return self.make(model)


WorkloadSource = Workload | Callable[[], Workload]


def import_target(target: str) -> WorkloadSource:
    """The function or Workload that "package.module:function" or "path/file.py:function" names; it is not called.

    A file is imported as a module of its own name, so that its ``if __name__ == "__main__"`` part does not run.
    Raises `WorkloadError` where there is no such file, module or function; the user's own exceptions pass through.
    """
    place, colon, attribute = target.rpartition(":")
    if not (colon and place and attribute):
        raise WorkloadError(f"{target!r} names no workload.", "Give path/file.py:function or package.module:function.")
    found: Any = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise WorkloadError(f"{place} has no {attribute!r}.", _WRITE_ONE)
        found = getattr(found, name)
    return check_source(found, target)


_WRITE_ONE = (
    "Name a function that returns one, such as `def workload(): return Workload(model=..., loss=..., data=...)`."
)


def check_source(found: Any, origin: str) -> WorkloadSource:
    """Check that `found` is a Workload or a function that can be called for one."""
    if isinstance(found, Workload) or callable(found):
        source: WorkloadSource = found
        return source
    raise WorkloadError(f"{origin} is a {type_name(found)}; it must be a Workload or make one.", _WRITE_ONE)


def make_workload(source: WorkloadSource, origin: str) -> Workload:
    """Call `source` if it is a function; raises `WorkloadError` where that returns no workload."""
    made = source if isinstance(source, Workload) else source()
    if not isinstance(made, Workload):
        raise WorkloadError(f"{origin} returned a {type_name(made)}; it must return a Workload.", _WRITE_ONE)
    return made


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # an import inside the user's module: its own exception, with its traceback
        raise WorkloadError(
            f"There is no module {error.name!r} on the path.",
            "Check the spelling, run from the folder that holds it, or give path/file.py:function.",
        ) from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise WorkloadError(f"There is no file {path}.", "Check the path: it is taken from the working directory.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as `python path/file.py` would have it
        sys.path.insert(0, folder)
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path.resolve()):
        return loaded
    name = path.stem if loaded is None else f"{path.stem}_workload"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} cannot be imported.", "Give a Python source file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes of the file can be pickled to loader workers
    spec.loader.exec_module(module)
    return module


def type_name(value: object) -> str:
    """The name of its type, with its module unless that is builtins."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
