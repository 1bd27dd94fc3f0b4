"""A Workload from a LightningModule: a trial runs its own training_step and configure_optimizers."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.workload import OptimizersOfModel, Workload, type_name
from autotune_amp.integrations.bridge import Window
from autotune_amp.integrations.lightning.plugin import AutotunePrecision, loss_of, mute, takes_batch_idx
from autotune_amp.trial.context import raise_learning_rates

# What schedules that ask the Trainer are made for. The epochs are Lightning's own where it is told nothing.
_MAX_EPOCHS, _MAX_STEPS = 1000, 10_000
ModuleSource = LightningModule | Callable[[], LightningModule]


def workload(module: ModuleSource, data: Any, **options: Any) -> Workload:
    """What ``lightning.Trainer().fit(module, data)`` trains, for `recommend_config`.

    module: the LightningModule, or a function that makes one with automatic optimization. Trials train copies of it.
    data: the LightningDataModule, whose ``train_dataloader()`` is the baseline and is tried with other batch sizes; or
        what ``Workload(data=...)`` takes. ``prepare_data()`` and ``setup("fit")`` are called here, on a copy.
    options: others of `Workload`'s: ``accumulation_steps`` and ``precision``, which your Trainer has today, ``name``,
        ``worst_batch``, ``evaluate``, ``checkpoint``.

    A trial calls the module's ``setup``, ``configure_model``, ``configure_optimizers`` and ``training_step``, and the
    hooks around the batch's transfer, which the module or the DataModule may have. ``self.log`` does nothing there,
    ``self.logger`` swallows everything. ``self.trainer`` is a Trainer of 1,000 epochs and at most 10,000 steps on one
    device, which has the copy of the DataModule and its loader, and is ``training``. Learning rates stay as
    ``configure_optimizers`` leaves them, but where its schedule begins below a tenth of its peak they are that tenth.
    What else the Trainer does (schedules, clipping, callbacks, loggers) is no part of a trial. A module with manual
    optimization becomes a loop of its own, without accumulation.

    Raises `WorkloadError` for what is no LightningModule, and for data with several loaders.
    """
    if not callable(module):  # a LightningModule is
        raise _not_a_module("Workload.from_lightning was given", module)
    fit = _Fit(module, *_opened(data))
    if isinstance(module, LightningModule) and not module.automatic_optimization:
        return Workload(build=fit.loop, train_step=fit.train_step, data=fit.data, **options)
    return Workload(fit.model, fit.loss, fit.data, OptimizersOfModel(fit.optimizers), **options)


def _not_a_module(what: str, given: Any) -> WorkloadError:
    return WorkloadError(
        f"{what} a {type_name(given)}; it must be a LightningModule, or a function that makes one.",
        "Pass the module itself, or `lambda: MyModule(...)`; its class comes from `import lightning`, not from "
        "pytorch_lightning.",
    )


def _opened(data: Any) -> tuple[LightningDataModule | None, Any]:
    """A copy of the DataModule, if there is one, as it is after its setup, and the data as `Workload` takes it."""
    if not isinstance(data, LightningDataModule):
        return None, data
    own = copy.copy(data)
    _trainer(own)
    with isolate_rng():
        own.prepare_data()
        own.setup("fit")
        loader = own.train_dataloader()
    own.trainer = None  # it is to travel
    if isinstance(loader, Mapping | list | tuple):
        raise WorkloadError(
            f"{type(data).__name__}.train_dataloader() returned several loaders, as a {type_name(loader)}.",
            "Give data=make_loader, a function of the batch size that returns one loader of the batches that "
            "training_step takes.",
        )
    return own, loader


class _Fit:
    """``Trainer.fit`` in the words of a `Workload`; it travels to trials, each of which makes a Trainer of its own."""

    def __init__(self, module: ModuleSource, datamodule: LightningDataModule | None, data: Any) -> None:
        self.module, self.datamodule, self.data = module, datamodule, data
        self.batch_idx = 0

    @functools.cached_property
    def trainer(self) -> Trainer:
        """It has the loader already: asked for the number of batches, Lightning would start the loader's workers."""
        trainer = _trainer(self.datamodule)
        num_batches = sized_len(self.data) if isinstance(self.data, DataLoader) else None
        trainer.fit_loop._combined_loader = CombinedLoader(self.data)
        trainer.fit_loop.max_batches = math.inf if num_batches is None else num_batches
        return trainer

    def model(self) -> LightningModule:
        """The module as a Trainer has it before its first step."""
        module = self.module if isinstance(self.module, LightningModule) else self.module()
        if not isinstance(module, LightningModule):
            raise _not_a_module("The module function returned", module)
        module.trainer = self.trainer
        module.setup("fit")
        module.configure_model()
        for part in module.modules():
            if isinstance(part, LightningModule):
                mute(part)
        return module

    def optimizers(self, module: LightningModule) -> list[Optimizer]:
        """Those of configure_optimizers."""
        module.trainer = self.trainer
        return _found(module.configure_optimizers())

    def loss(self, module: LightningModule, batch: Any) -> Tensor:
        """That of training_step."""
        module.trainer = self.trainer  # which a copy of the module does not have
        loss: Tensor = loss_of(self._output(module, self._transferred(module, batch)))
        return loss

    def loop(self) -> dict[str, Any]:
        """The state of a module with manual optimization."""
        module = self.model()
        optimizers = self.optimizers(module)
        for optimizer in optimizers:
            raise_learning_rates(optimizer)
        return {"module": module, "optimizers": optimizers}

    def train_step(self, state: dict[str, Any], batch: Any, amp: Any) -> None:
        """The training_step of a module with manual optimization."""
        module, strategy = state["module"], self.trainer.strategy
        module.trainer = self.trainer
        if strategy.optimizers is not state["optimizers"]:
            strategy.connect(module)
            strategy.optimizers = state["optimizers"]
        strategy.precision_plugin = plugin = _TrialPrecision(amp)
        batch = self._transferred(module, batch)
        with plugin.train_step_context():
            self._output(module, batch)

    def _transferred(self, module: LightningModule, batch: Any) -> Any:
        with torch.autocast(module.device.type, enabled=False):
            for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
                is_of_data = self.datamodule is not None and is_overridden(name, self.datamodule)
                batch = getattr(self.datamodule if is_of_data else module, name)(batch, 0)
        return batch

    def _output(self, module: LightningModule, batch: Any) -> Any:
        self.batch_idx += 1  # what a training_step does only for the first batch is not done
        return module.training_step(batch, *((self.batch_idx,) if takes_batch_idx(module) else ()))


class _TrialPrecision(AutotunePrecision):
    """The plugin with a trial's amp in the controller's place."""

    def __init__(self, amp: Any) -> None:
        super().__init__(amp.config)
        self._controller = amp
        self._window = Window(amp)


def _found(made: Any) -> list[Optimizer]:
    """The optimizers in what configure_optimizers returned: one, several, or either with schedulers."""
    if isinstance(made, Optimizer):
        return [made]
    if isinstance(made, Mapping):
        return _found(made.get("optimizer"))
    return [optimizer for part in made for optimizer in _found(part)] if isinstance(made, list | tuple) else []


def _trainer(datamodule: LightningDataModule | None) -> Trainer:
    """For modules that ask it something, as if it fitted: it runs nothing, writes nothing, and knows of no launcher."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.ERROR)  # what it says of the devices is not this training's
    try:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=_MAX_EPOCHS,
            max_steps=_MAX_STEPS,
            logger=DummyLogger(),
            plugins=[LightningEnvironment()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    finally:
        log.setLevel(level)
    trainer.state.fn = TrainerFn.FITTING
    trainer.training = True
    trainer.datamodule = datamodule  # type: ignore[attr-defined] # set without a type
    if datamodule is not None:
        datamodule.trainer = trainer
    return trainer
