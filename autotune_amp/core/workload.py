"""Workload: a model to train with its data, and loading it from "package.module:function" or "path/file.py:function".

Example with a training loop of one's own:

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

* **Training loops of your own** (a GAN, a diffusion model): `build` and `train_step` replace model, loss and optimizer.
  Build on the CPU: the result of `build` is moved to the device. The loop is compared with fp32 like any other
  workload; accumulation is not offered, since the loop takes its own steps. Several optimizers alone need no loop:
  `optimizer=` may return them in a list.
* **Accumulation** is offered only if it trains the same model: on your own samples, the gradients of the micro-batches
  must add up to that of the whole batch. With BatchNorm, in-batch negatives, or a queue or codebook that each forward
  pass changes they do not, and the report says so. If the loss is a mean over tokens, of which micro-batches hold
  unequal numbers, they add up with the right weights, and the report says which. Samples with unequal numbers are
  picked on purpose, out of up to 2,048 found in a one-second scan of the dataset; for a stream, whose samples cannot be
  picked, the first batch is used.
* **Varying lengths**: memory is measured on the largest samples found by scanning the dataset for a second or two, with
  the size that `collate_fn` gives each alone, or on `Workload(worst_batch=...)`. The speed is that of batches
  from all over an epoch of your own sampler, from the same places for every candidate; a stream's batches come in its
  own order. `evaluate=` and `checkpoint=` are run once for each confirmed candidate, within a tenth of the
  budget, so that the memory holds for them too; if one raises or takes longer, the report says so, but the candidate is
  not penalized.
* **A slow data loader** is detected: the report gives the speed of the step alone, and other numbers of workers are
  tried.
* **Under torchrun** (or any launcher that sets torch's `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`), and
  under Slurm's plain `srun`, call `recommend_config()` on every rank, before or after `init_process_group()`: rank 0
  searches, the others wait for its answer. Your batch size is per rank, `--effective-batch-size` is over all ranks.
  Trials do not see the launcher's variables: give `LOCAL_RANK` a default where your code reads it. A live model may be
  wrapped in DistributedDataParallel, which trials remove; for FSDP pass the bare model.
* **Models that take long to build** are built once and shared by the trials; the confirmation's processes build
  their own. **Compiled models**: compiling is not part of the step time, and the compiler's cache is shared. A live
  model compiled in place by `model.compile()` is refused: call that where the model is made, or pass
  `torch.compile(model)`.

On a CPU the peak memory is the highest of the confirmation's processes, without that of loader workers. The study
`studies/truth` compares it with longer training runs, `studies/real_training` checks the rest on six training runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune_amp.core.errors import WorkloadError

if TYPE_CHECKING:
    from autotune_amp.core.config import LossScale
    from autotune_amp.core.precisions import Precision
    from autotune_amp.core.setting import Setting


class Fitting(NamedTuple):
    """Argument of ``Workload(fit=...)``: the objects to train, in a process of the confirmation.

    `model` is on its device, `optimizer` has its parameters, and `data` yields batches of the setting's size: a
    DataLoader, or another iterable if the workload has none. `scaler` is a GradScaler with `loss_scale`, None if the
    setting needs none. Call ``stepped(loss, num_batches)`` after each optimizer step, with the number of batches in
    that step; it raises an exception when enough was measured, which `fit` must not catch.
    """

    model: Any
    optimizer: Any
    data: Any
    setting: Setting
    loss_scale: LossScale | None
    scaler: Any
    stepped: Callable[[Any, int], None]


@dataclass(eq=False, repr=False)
class Workload:
    """Parts of a training step. No object passed in is ever changed: trials run on copies in other processes.

    Either a model, a loss and an optimizer:

    model       an ``nn.Module``, or a function without arguments that makes one
    loss        ``loss(model, batch) -> Tensor``: runs the model on one batch and returns a scalar
    optimizer   a class or function of the parameters that makes an optimizer, or several in a list; or an optimizer
                instance (or a list of them) whose class and hyperparameters are copied (a learning rate that its
                scheduler holds below a tenth of its peak is set to that tenth); ``torch.optim.AdamW`` with its defaults
                if left out

    Or a training loop (a GAN, a diffusion model with its EMA):

    build       ``build() -> state``: everything that training needs, models and optimizers in any container
    train_step  ``train_step(state, batch, amp)``: one training step with all its optimizers, using `amp` like a
                `PrecisionController`: ``amp.autocast()``, ``amp.backward(loss)``,
                ``amp.step(optimizer)``, ``amp.update()``

    And for both:

    data        a Dataset; a DataLoader, whose batch size and settings become the baseline; or a function of the batch
                size that returns one batch of so many samples, or a loader (a DataLoader or an iterator) of such
                batches
    name        the study's name; letters, digits, '.', '_' and '-'
    worst_batch ``worst_batch(batch_size) -> batch``: the batch that needs the most memory, if batches differ; found by
                scanning the dataset if left out
    evaluate    ``evaluate(model)``, or ``evaluate(state)`` for a loop: one evaluation pass
    checkpoint  ``checkpoint(model, optimizer, folder)``, or ``checkpoint(state, folder)`` for a loop: writes a
                checkpoint
    accumulation_steps, precision: the present number of passes per optimizer step, and the precision that the training
                code enables by itself, if the data and torch's flags do not show them
    weighs_passes: whether the training code itself weights the passes of a step by the denominators of their losses
    clip        ``clip(model)``: called before each optimizer step, on gradients without a loss scale
    schedule    ``schedule(optimizer)``: makes the learning rate's schedulers, in a list, stepped after each step
    fit         ``fit(fitting)``: trains in the loop of a framework, named by `trainer`; the promised speed is
                measured in its steps. See `Fitting`.
    trainer_ranks: the number of devices that the framework's loop trains on at the same time; trials use one

    Evaluation and checkpoint are run during the confirmation of a recommendation, so that its memory holds for a whole
    training run. Raises `WorkloadError` for arguments of another type.
    """

    model: Any = None
    loss: Callable[[Any, Any], Any] | None = None
    data: Any = None
    optimizer: Any = None
    name: str = "workload"
    _: KW_ONLY
    build: Callable[[], Any] | None = None
    train_step: Callable[[Any, Any, Any], Any] | None = None
    worst_batch: Callable[[int], Any] | None = None
    evaluate: Callable[[Any], Any] | None = None
    checkpoint: Callable[..., Any] | None = None
    accumulation_steps: int = 1
    precision: Precision | None = None
    weighs_passes: bool = False
    clip: Callable[[Any], Any] | None = None
    schedule: Callable[[Any], Any] | None = None
    fit: Callable[[Fitting], None] | None = None
    trainer: str | None = None
    trainer_ranks: int = 1

    def __post_init__(self) -> None:
        self._check_parts()
        self._check_present_setting()

    @classmethod
    def from_trainer(cls, trainer: Any) -> Workload:
        """Make a workload from a ``transformers.Trainer``.

        It takes the trainer's model, loader, optimizer, ``training_step``, clipping and schedule; the present batch
        size, accumulation and mixed precision are those of its TrainingArguments. A trial's loss is normalised over a
        pass (``num_items_in_batch``) where the Trainer does so over all passes of a step.

        The promised speed is measured in the steps of the Trainer's own ``train()``, with its callbacks and its
        logging. There it neither evaluates nor saves nor uploads; its ``report_to`` and early stopping are left out; it
        is stopped between two steps, so that the code after its last step does not run. The schedule is that of its
        arguments over 10,000 steps. The trainer is not changed. Raises `WorkloadError` for a trainer that uses
        DeepSpeed or FSDP, has no train_dataset, has trained in mixed precision before, or is an AutotuneTrainer.
        """
        return _adapter("transformers")(trainer)

    @classmethod
    def from_lightning(cls, module: Any, data: Any, trainer: Any = None, **options: Any) -> Workload:
        """Make a workload of ``trainer.fit(module, data)``. See `integrations.lightning_workload.workload`."""
        return _adapter("lightning")(module, data, trainer, **options)

    @property
    def is_loop(self) -> bool:
        """Return whether the workload has a training loop of its own, with `build` and `train_step`."""
        return self.build is not None or self.train_step is not None

    def _check_parts(self) -> None:
        loop = self.build, self.train_step
        parts = self.model, self.loss, self.optimizer, self.clip, self.schedule, self.fit
        if self.is_loop and (None in loop or any(part is not None for part in parts)):
            raise WorkloadError(
                "A Workload is either model, loss and optimizer, or both build and train_step.",
                "For a training loop give only build=, train_step= and data=: build() makes the models and optimizers.",
            )
        optimizers = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        are_optimizers = bool(optimizers) and all(hasattr(optimizer, "param_groups") for optimizer in optimizers)
        kinds = {kind.__name__ for kind in type(self.data).__mro__}  # torch is not imported for it
        is_of_torch = not kinds.isdisjoint(("DataLoader", "IterableDataset"))
        is_data = callable(self.data) or hasattr(self.data, "__getitem__") or is_of_torch
        sgd = "`lambda parameters: torch.optim.SGD(parameters, lr=0.1)`"
        requirements = {
            "model": (self.is_loop or callable(self.model), "an nn.Module or a function, as `lambda: MyModel()`"),
            "loss": (self.is_loop or callable(self.loss), "a function, as `lambda model, batch: model(batch).loss`"),
            "optimizer": (
                self.optimizer is None or callable(self.optimizer) or are_optimizers,
                f"an optimizer or a function of the parameters, as {sgd}",
            ),
            "data": (
                is_data and not isinstance(self.data, Iterator),
                "a Dataset, a DataLoader or a function of the batch size; not an iterator, which can be used only once",
            ),
        }
        for name in ("build", "train_step", "worst_batch", "evaluate", "checkpoint", "clip", "schedule", "fit"):
            requirements[name] = (getattr(self, name) is None or callable(getattr(self, name)), "a function")
        for name, (is_valid, expected) in requirements.items():
            if not is_valid:
                kind = type_name(getattr(self, name))
                raise WorkloadError(f"Workload({name}=...) is a {kind}; it must be {expected}.", f"Pass such a {name}.")

    def _check_present_setting(self) -> None:
        steps = self.accumulation_steps
        if type(steps) is not int or steps < 1 or (self.is_loop and steps > 1):
            raise WorkloadError(
                f"Workload(accumulation_steps={steps!r}); it must be a whole number from 1 up, and 1 for a loop of "
                "your own, which accumulates by itself.",
                "Leave accumulation_steps out, or pass the number of passes behind an optimizer step.",
            )
        if self.precision not in (None, "fp32", "tf32", "bf16", "fp16"):
            raise WorkloadError(
                f"Workload(precision={self.precision!r}); it must be fp32, tf32, bf16 or fp16.",
                "Leave precision out to have it read from torch's autocast and TF32 flags.",
            )
        if type(self.trainer_ranks) is not int or self.trainer_ranks < 1:
            raise WorkloadError(
                f"Workload(trainer_ranks={self.trainer_ranks!r}); it must be a whole number from 1 up.",
                "Leave trainer_ranks out, or pass the number of devices that the training runs on.",
            )


def _adapter(framework: str) -> Callable[..., Workload]:
    """Return a framework's `workload` function, imported by name so that the core does not depend on frameworks."""
    module = importlib.import_module(f"autotune_amp.integrations.{framework}_workload")
    adapter: Callable[..., Workload] = module.workload
    return adapter


class OptimizersOfModel:
    """Argument ``Workload(optimizer=...)`` for models that make their own optimizers: wraps a function of the model."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __call__(self, model: Any) -> Any:
        """Return the optimizers of `model`."""
        return self.make(model)


WorkloadSource = Workload | Callable[[], Workload]


def import_target(target: str) -> WorkloadSource:
    """Import the function or Workload that "package.module:function" or "path/file.py:function" names; do not call it.

    A file is imported as a module of its own name, so that its ``if __name__ == "__main__"`` part does not run. Raises
    `WorkloadError` if the file, module or function does not exist; exceptions of the user's code pass through.
    """
    module_name, colon, attribute = target.rpartition(":")
    if not (colon and module_name and attribute):
        raise WorkloadError(f"{target!r} names no workload.", "Give path/file.py:function or package.module:function.")
    obj: Any = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    for name in attribute.split("."):
        if not hasattr(obj, name):
            raise WorkloadError(f"{module_name} has no {attribute!r}.", _NAME_A_FUNCTION)
        obj = getattr(obj, name)
    return check_source(obj, target)


_NAME_A_FUNCTION = (
    "Name a function that returns one, such as `def workload(): return Workload(model=..., loss=..., data=...)`."
)


def check_source(obj: Any, origin: str) -> WorkloadSource:
    """Return `obj` if it is a Workload or callable; otherwise raise `WorkloadError`, naming it by `origin`."""
    if isinstance(obj, Workload) or callable(obj):
        source: WorkloadSource = obj
        return source
    raise WorkloadError(f"{origin} is a {type_name(obj)}; it must be a Workload or make one.", _NAME_A_FUNCTION)


def make_workload(source: WorkloadSource, origin: str) -> Workload:
    """Return `source`, or the workload that it returns. Raises `WorkloadError` if it returns something else."""
    workload = source if isinstance(source, Workload) else source()
    if not isinstance(workload, Workload):
        raise WorkloadError(f"{origin} returned a {type_name(workload)}; it must return a Workload.", _NAME_A_FUNCTION)
    return workload


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
        raise WorkloadError(f"There is no file {path}.", "Check the path, which is relative to the working directory.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as `python path/file.py` does
        sys.path.insert(0, folder)
    loaded_module = sys.modules.get(path.stem)
    if loaded_module is not None and getattr(loaded_module, "__file__", None) == str(path.resolve()):
        return loaded_module
    name = path.stem if loaded_module is None else f"{path.stem}_workload"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} cannot be imported.", "Give a Python source file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes of the file can be pickled to loader workers
    spec.loader.exec_module(module)
    return module


def type_name(value: object) -> str:
    """Return the name of the type of `value`, with its module except for builtins."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
