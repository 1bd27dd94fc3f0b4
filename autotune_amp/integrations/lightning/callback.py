"""AutotuneCallback: what the controller does, in the Trainer's logs, and a clean end where a run has to start again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from autotune_amp.core.config import DemotedError
from autotune_amp.core.errors import InvalidRequestError, TrainingStoppedError
from autotune_amp.integrations.lightning.plugin import AutotunePrecision
from autotune_amp.runtime.status import MoveRecord


class AutotuneCallback(Callback):
    """Goes with `AutotunePrecision`, which works without it: logs, settings that differ, and a clean end.

    Writes ``autotune_amp/rung`` (0 is the config's own precision, then its fallbacks), ``scale``, ``skips``, ``steps``
    and ``moves`` to the Trainer's loggers every ``log_every_n_steps`` optimizer steps and with every move. Warns where
    the Trainer's accumulation, or the DataLoader's batch size or workers, are not what the config says.

    Where the run has to start again (see `AutotunePrecision`) it saves a checkpoint at the end of that batch and stops
    the Trainer: `fit` returns, `demotion` is the `DemotedError` with the config to go on with, and `checkpoint_path`
    names the checkpoint for ``fit(ckpt_path=...)`` under a Trainer and a DataLoader made from it. Where the Trainer's
    ``min_epochs`` or ``min_steps`` keep it from stopping, `fit` raises that error after saving, as it does with
    `NotPrecisionError` and `NoRungFitsError`.

    checkpoint_path: where to save it; ``autotune_amp.ckpt`` in the Trainer's ``default_root_dir`` if None.
    """

    def __init__(self, checkpoint_path: str | os.PathLike[str] | None = None) -> None:
        self.checkpoint_path = None if checkpoint_path is None else Path(checkpoint_path)
        self.demotion: DemotedError | None = None
        self._stopped: TrainingStoppedError | None = None
        self._logged_step = 0
        self._has_saved = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 # a hook
        """Listen to the controller. Raises `InvalidRequestError` for a Trainer without `AutotunePrecision`."""
        plugin = _plugin(trainer)
        self.demotion = self._stopped = None
        self._has_saved, self._logged_step = False, 0
        plugin.stop_handler = self._note_stop

        def write(_: MoveRecord) -> None:
            self._write(trainer)

        plugin.controller.on_move(write)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 # a hook
        """Warn where what runs is not what the config says."""
        config = _plugin(trainer).controller.config
        found: list[tuple[str, int | None, int]] = [
            ("Trainer(accumulate_grad_batches)", trainer.accumulate_grad_batches, config.accumulation_steps),
        ]
        loader = trainer.train_dataloader
        if isinstance(loader, DataLoader):
            found.append(("DataLoader(batch_size)", loader.batch_size, config.batch_size))
            if config.num_workers is not None:
                found.append(("DataLoader(num_workers)", loader.num_workers, config.num_workers))
        for name, value, wanted in found:
            if value is not None and value != wanted:
                rank_zero_warn(
                    f"{name} is {value}; the config says {wanted}, and what it promises was measured with that."
                )

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Write the log where it is due; end the training where it has to start again."""
        step = trainer.global_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined] # set without a type; 0 for never
        if every and step != self._logged_step and step % every == 0:
            self._logged_step = step
            # A verdict that was still on its way from the device may end the run here.
            _plugin(trainer).handing_over(lambda: self._write(trainer))
        if self._stopped is None:
            return
        if self._has_saved:  # a batch before; min_epochs or min_steps has kept the Trainer from stopping
            raise self._stopped
        self.checkpoint_path = self.checkpoint_path or Path(trainer.default_root_dir) / "autotune_amp.ckpt"
        trainer.save_checkpoint(self.checkpoint_path)
        self._has_saved = True
        trainer.should_stop = True
        rank_zero_info(f"{self._stopped}\nThe checkpoint is {self.checkpoint_path}.")
        if self.demotion is None:
            raise self._stopped

    def on_fit_end(self, trainer: Trainer, *_: Any) -> None:
        """Leave the plugin alone."""
        if isinstance(trainer.precision_plugin, AutotunePrecision):
            trainer.precision_plugin.stop_handler = None

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        """Leave it alone after what `fit` raises, too."""
        self.on_fit_end(trainer)

    def _note_stop(self, error: TrainingStoppedError) -> None:
        self._stopped = error
        self.demotion = error if isinstance(error, DemotedError) else None

    def _write(self, trainer: Trainer) -> None:
        plugin = _plugin(trainer)
        status = plugin.controller.status()
        precisions = [plugin.config.precision, *(plan.precision for plan in plugin.config.plans)]
        values: dict[str, float] = {
            "rung": precisions.index(plugin.controller.config.precision),
            "scale": status.scale,
            "skips": status.num_skips,
            "steps": status.num_steps,
            "moves": len(status.history),
        }
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"autotune_amp/{name}": value for name, value in values.items()}, step=trainer.global_step
            )


def _plugin(trainer: Trainer) -> AutotunePrecision:
    plugin = trainer.precision_plugin
    if not isinstance(plugin, AutotunePrecision):
        raise InvalidRequestError(
            f"AutotuneCallback found {type(plugin).__name__} as the Trainer's precision plugin.",
            "Make the Trainer with plugins=[AutotunePrecision(config)], or with trainer_arguments(config).",
        )
    return plugin
