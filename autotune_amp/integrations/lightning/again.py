"""A LightningModule's training_step called by us: what it takes and returns, and once more without a trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric


class LatestBatch(Callback):
    """Holds the batch of the training step that runs, on its device, and nothing between the steps."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.batch_idx = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Keep it."""
        self.batch, self.batch_idx = batch, batch_idx

    def on_train_batch_end(self, *_: Any) -> None:
        """Let it go."""
        self.batch = None


def can_run_again(module: LightningModule) -> bool:
    """Whether its training_step leaves the steps to the Trainer, and gets a batch rather than the loader's iterator."""
    takes_iterator = is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
    return module.automatic_optimization and not takes_iterator


def loss_again(module: LightningModule, latest: LatestBatch) -> Tensor:
    """The loss of the latest batch as the backward pass got it; what the step logs and counts is left out."""
    trainer = module.trainer
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, LightningModule):
                stack.enter_context(_muted(part))
            elif isinstance(part, Metric):
                stack.enter_context(_kept(part))
        index = (latest.batch_idx,) if takes_batch_idx(module) else ()
        output = trainer.strategy.training_step(latest.batch, *index)
    loss: Tensor = loss_of(output)  # None, too, which the diagnosis names
    return loss / trainer.accumulate_grad_batches if isinstance(loss, Tensor) else loss


def takes_batch_idx(module: LightningModule) -> bool:
    """Whether Lightning calls its training_step with the batch's index too."""
    return is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)


def loss_of(output: Any) -> Any:
    """The loss in what a training_step returned: itself, or under the key "loss"."""
    return output.get("loss") if isinstance(output, Mapping) else output


def mute(module: LightningModule) -> None:
    """Have its `log` and `log_dict` do nothing."""
    vars(module).update(log=_nothing, log_dict=_nothing)


@contextmanager
def _muted(module: LightningModule) -> Iterator[None]:
    own = vars(module)
    kept: dict[str, Any] = {name: own[name] for name in ("log", "log_dict") if name in own}
    mute(module)
    try:
        yield
    finally:
        del own["log"], own["log_dict"]
        own.update(kept)


def _nothing(*_: Any, **__: Any) -> None:
    """Neither logged nor kept."""


@contextmanager
def _kept(metric: Metric) -> Iterator[None]:
    """Put back what it has counted."""
    replaced = {name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")}
    counted = copy.deepcopy(metric.metric_state)
    try:
        yield
    finally:
        for name, value in (counted | replaced).items():
            setattr(metric, name, value)
