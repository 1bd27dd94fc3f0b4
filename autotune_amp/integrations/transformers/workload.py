"""A Transformers Trainer as a workload: a trial runs its own training_step on a copy in another process."""

from __future__ import annotations

import copy
import functools
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.setting import Precision
from autotune_amp.core.workload import Workload, type_name
from autotune_amp.integrations.transformers.trainer import AutotuneTrainer, caught_losses, refuse_baked_autocast

# What training_step has no part in, and what reports, writes or cannot leave this process.
_LEFT_BEHIND = (
    "accelerator",
    "gather_function",
    "eval_dataset",
    "compute_metrics",
    "lr_scheduler",
    "optimizer",
    "model_init",  # train() would make another model
)
_QUIET = {"report_to": [], "push_to_hub": False, "output_dir": "", "auto_find_batch_size": False, "debug": []}


def workload(trainer: Trainer) -> Workload:
    """See `Workload.from_trainer`."""
    _refuse(trainer)
    return Workload(
        model=trainer.model,
        loss=_Step(_travelling(trainer)),
        data=_loader(trainer),
        optimizer=_optimizer(trainer),
        name=type(trainer.model).__name__,
        accumulation_steps=trainer.args.gradient_accumulation_steps,
        precision=_precision(trainer),
        weighs_passes=_weighs_passes(trainer),
    )


def _refuse(trainer: Trainer) -> None:
    if isinstance(trainer, AutotuneTrainer):
        raise WorkloadError(
            f"{type_name(trainer)} is an AutotuneTrainer, which sets the precision that is to be searched.",
            "Give the Trainer that it is made from, with the same arguments.",
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise WorkloadError(
            "The Trainer trains under DeepSpeed or FSDP, and a trial on one device alone.",
            "Give a Trainer without them whose model fits on one device.",
        )
    if trainer.train_dataset is None:
        raise WorkloadError("The Trainer has no train_dataset.", "Pass train_dataset= to it.")
    refuse_baked_autocast(trainer, WorkloadError)


def _precision(trainer: Trainer) -> Precision | None:
    """That of Accelerate's autocast where it sets one (fp16 on a CPU does not); else torch's flags say it."""
    named = trainer.accelerator.mixed_precision
    return named if trainer.accelerator.native_amp and named in ("bf16", "fp16") else None


def _weighs_passes(trainer: Trainer) -> bool:
    """Whether a loss is divided by the items of all passes of its step, as ``training_step`` sees it.

    Items are counted under "labels" alone; without them a mean loss is divided by the number of passes.
    """
    if trainer.loss_is_scaled_for_ga is not None:
        return trainer.loss_is_scaled_for_ga
    counts_items = trainer.model_accepts_loss_kwargs and "labels" in trainer.label_names
    return counts_items or trainer.compute_loss_func is not None


class _Unprepared:
    """In the place of an accelerator while a loader is made, which is wanted as it is."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def prepare(self, loader: Any) -> Any:
        return loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _loader(trainer: Trainer) -> DataLoader[Any]:
    """The trainer's own train loader, its collator and sampler, at the batch size of one device."""
    maker = copy.copy(trainer)
    maker.accelerator = _Unprepared(trainer.accelerator)
    maker._train_batch_size = trainer.args.per_device_train_batch_size
    if type(trainer)._remove_unused_columns is Trainer._remove_unused_columns:
        vars(maker)["_remove_unused_columns"] = functools.partial(_with_used_columns, maker)
    return maker.get_train_dataloader()


def _with_used_columns(trainer: Trainer, dataset: Any, description: str | None = None) -> Any:
    """Without the unused columns, in one order: the Trainer's is a set's, and the dataset's own digest counts it."""
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        unused = sorted(set(dataset.column_names) - set(trainer._signature_columns or ()))
        if len(unused) < len(dataset.column_names):  # otherwise the Trainer raises
            dataset = dataset.remove_columns(unused)
    return Trainer._remove_unused_columns(trainer, dataset, description)


def _optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """The trainer's own, or one as it would make it; only its class and hyperparameters are taken."""
    maker = copy.copy(trainer)
    optimizer = maker.create_optimizer()
    return getattr(optimizer, "optimizer", optimizer)  # out of Accelerate's wrapper, after a training


def _travelling(trainer: Trainer) -> Trainer:
    """A copy, which shares the model and the dataset, without what only this process can have."""
    left = copy.copy(trainer)
    left.__dict__.update(dict.fromkeys(_LEFT_BEHIND))
    left.args = copy.copy(trainer.args)
    left.args.__dict__.update(_QUIET, distributed_state=None, gradient_accumulation_steps=1)
    left.args.__dict__.pop("_setup_devices", None)  # found again where it runs
    flow = [DefaultFlowCallback()]
    left.callback_handler = CallbackHandler(flow, left.model, left.processing_class, None, None)  # type: ignore[no-untyped-call] # transformers does not type it
    left.state, left.control = TrainerState(), TrainerControl()
    return left


class _Step:
    """``loss(model, batch)``: the loss that the trainer's training_step would go back from."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._site: _Site | None = None  # of the process that runs it

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self._site is None:
            self._site = _Site(self._trainer, next(model.parameters()).device)
        return self._site.loss(model, batch)


class _Site:
    """A trainer that has arrived where its trials run, on `device`."""

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        args = trainer.args
        args.use_cpu = device.type == "cpu"
        found = args.device
        if found.type != device.type or (found.index or 0) != (device.index or 0):
            raise WorkloadError(
                f"The Trainer would train on {found}, the trial on {device}.",
                f"Search with device={str(found)!r}, and choose among several by CUDA_VISIBLE_DEVICES.",
            )
        args._n_gpu = min(1, args.n_gpu)
        args.mixed_precision = "no"  # the precision is the trial's
        trainer.create_accelerator_and_postprocess()
        self._trainer = trainer
        self._made_ready: WeakSet[nn.Module] = WeakSet()
        self._prepared: tuple[nn.Module, nn.Module] | None = None  # the latest model, and as Accelerate has it

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """That of one pass over `batch`, as if it were all of an optimizer step."""
        trainer = self._trainer
        if self._prepared is None or self._prepared[0] is not model:
            self._make_ready(model)
            self._prepared = model, trainer.accelerator.prepare_model(model)
        (inputs,), num_items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        trainer.current_gradient_accumulation_steps = 1
        with caught_losses(trainer.accelerator) as losses:
            trainer.training_step(self._prepared[1], inputs, num_items)
        if not losses:
            raise WorkloadError(
                f"{type_name(trainer)}.training_step did not call self.accelerator.backward(loss).",
                "Call it in place of loss.backward(), as the Trainer's own training_step does.",
            )
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _make_ready(self, model: nn.Module) -> None:
        """All that ``train()`` does to a model before its loop: activation checkpointing, NEFTune, Liger kernels."""
        if model in self._made_ready:
            return
        self._made_ready.add(model)
        self._trainer.model = self._trainer.model_wrapped = model
        vars(self._trainer)["_inner_training_loop"] = _no_loop
        Trainer.train(self._trainer)


def _no_loop(**_: Any) -> None:
    """In the place of the Trainer's loop."""
