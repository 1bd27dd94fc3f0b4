"""Workload: what is trained, and loading it from "package.module:function" or "path/file.py:function"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune_amp.core.errors import WorkloadError

if TYPE_CHECKING:
    from autotune_amp.core.dimensions import Precision


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
        self._check_parts()
        self._check_today()

    @classmethod
    def from_trainer(cls, trainer: Any) -> Workload:
        """What a ``transformers.Trainer`` trains: its model, train loader, optimizer and ``training_step``.

        Today's batch size, accumulation and mixed precision are those of its TrainingArguments. A trial runs a pass of
        the trainer's own ``training_step`` at its own batch size, collated and sampled by the trainer's loader, its
        loss normalised over the pass (``num_items_in_batch``) where the Trainer does so over all passes of a step. The
        trainer is left as it was. Raises `WorkloadError` for one that trains under DeepSpeed or FSDP, has no
        train_dataset, has trained in mixed precision before, or is an AutotuneTrainer.
        """
        return _adapter("transformers")(trainer)

    @classmethod
    def from_lightning(cls, module: Any, data: Any, **options: Any) -> Workload:
        """What ``lightning.Trainer().fit(module, data)`` trains; see `autotune_amp.integrations.lightning.workload`."""
        return _adapter("lightning")(module, data, **options)

    @property
    def is_loop(self) -> bool:
        """Whether it takes its training steps itself."""
        return self.build is not None or self.train_step is not None

    def _check_parts(self) -> None:
        loop, parts = (self.build, self.train_step), (self.model, self.loss, self.optimizer)
        if self.is_loop and (None in loop or any(part is not None for part in parts)):
            raise WorkloadError(
                "A Workload is either model, loss and optimizer, or both build and train_step.",
                "Give build=, train_step= and data= alone: build() makes the models and optimizers itself.",
            )
        given = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        are_optimizers = bool(given) and all(hasattr(optimizer, "param_groups") for optimizer in given)
        is_data = callable(self.data) or hasattr(self.data, "__getitem__") or hasattr(self.data, "__iter__")
        functions = ("build", "train_step", "worst_batch", "evaluate", "checkpoint")
        for name, is_right, wanted, next_step in (
            (
                "model",
                self.is_loop or callable(self.model),
                "an nn.Module or a function that makes one",
                "Pass the model itself or `lambda: MyModel(...)`.",
            ),
            (
                "loss",
                self.is_loop or callable(self.loss),
                "a function loss(model, batch) -> Tensor",
                "Pass e.g. `lambda model, batch: model(batch).loss`.",
            ),
            (
                "optimizer",
                self.optimizer is None or callable(self.optimizer) or are_optimizers,
                "a function of the parameters or an optimizer",
                "Pass for example `lambda parameters: torch.optim.SGD(parameters, lr=0.1)`.",
            ),
            (
                "data",
                is_data and not isinstance(self.data, Iterator),
                "a Dataset, a DataLoader or a function of the batch size; an iterator can be used only once",
                "Pass the Dataset or DataLoader, or `lambda n: (torch.randn(n, 8), torch.randint(2, (n,)))`.",
            ),
            *(
                (name, given is None or callable(given), "a function", f"Pass it itself, as `{name}=my_{name}`.")
                for name, given in ((name, getattr(self, name)) for name in functions)
            ),
        ):
            if not is_right:
                kind = type_name(getattr(self, name))
                raise WorkloadError(f"Workload({name}=...) is a {kind}; it must be {wanted}.", next_step)

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
    adapter: Callable[..., Workload] = importlib.import_module(f"autotune_amp.integrations.{framework}").workload
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
