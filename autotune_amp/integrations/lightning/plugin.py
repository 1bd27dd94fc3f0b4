"""AutotunePrecision: the controller as Lightning's Precision plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from autotune_amp.core.config import AmpConfig, DemotedError
from autotune_amp.core.errors import InvalidRequestError, TrainingStoppedError
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.integrations.lightning.again import LatestBatch, can_run_again, loss_again
from autotune_amp.numerics.modules import unwrap
from autotune_amp.runtime.controller import PrecisionController

# Lightning's.
_NAMES = {
    "fp32": "32-true",
    "tf32": "32-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "fp8": "transformer-engine",
}


class AutotunePrecision(Precision):
    """Lightning's precision plugin with a `PrecisionController` for a scaler, on any device.

    It is for ``import lightning``: a Trainer of the standalone ``pytorch_lightning`` has classes of its own, and takes
    neither this nor `AutotuneCallback`.

    ``Trainer(plugins=[AutotunePrecision(recommendation)])``; see `trainer_arguments` for the settings beside it. It
    takes the place of ``Trainer(precision=...)``, whose fp16 on a CPU is bf16 without a scaler. The precision is
    stepped down when precision is what fails; a checkpoint holds the controller's state and resumes at its rung.

    With automatic optimization a trip is diagnosed by running ``training_step`` again on the latest batch; what it logs
    and adds to torchmetrics then is left out. With manual optimization ``training_step`` takes steps itself, so the
    precision is stepped down on trial, and ``optimizer.step()`` gives what is true if it stepped. Schedulers are
    Lightning's affair: it steps them for skipped steps too.

    A DataLoader keeps its batch size while the Trainer runs. Where a fallback of the config was measured with another
    batch size or accumulation, `fit` therefore raises `DemotedError` with the config to start again with, as it does
    everywhere with ``on_demotion="checkpoint_and_stop"``; with an `AutotuneCallback` it ends with a checkpoint instead.
    A checkpoint of such a rung does not go on with the config from before: `fit` raises that error at once.
    `fit` also raises `NotPrecisionError` and `NoRungFitsError` (unless ``halt=False``), and `InvalidRequestError` for
    optimizers that call their closure several times (LBFGS).

    config: what the run is to use, or the recommendation that holds it.
    options: those of `PrecisionController`: ``guard``, ``halt``, ``on_demotion``, ``max_slowdown``, ``promote``,
        ``run_log`` and so on.
    """

    def __init__(self, config: AmpConfig | Recommendation, **options: Any) -> None:
        self.config = config if isinstance(config, AmpConfig) else config.config
        # The callback's, which ends the training.
        self.stop_handler: Callable[[TrainingStoppedError], object] | None = None
        self._options = options
        self._controller: PrecisionController | None = None
        self._module: LightningModule | None = None
        self._latest = LatestBatch()
        self._unscaled: set[int] = set()  # ids of the optimizers whose gradients are unscaled in this window
        self._has_stepped = False  # an optimizer, in this window

    def __repr__(self) -> str:
        """Says whose plugin it is, since pytorch_lightning's Trainer refuses it with this alone."""
        return f"AutotunePrecision({self.config.precision}), which is for `import lightning`, not pytorch_lightning"

    @property
    def controller(self) -> PrecisionController:
        """The controller of the current or the latest run. Raises `InvalidRequestError` before the first."""
        if self._controller is None:
            raise InvalidRequestError(
                "AutotunePrecision has no controller yet: it is made when the Trainer has put the model on its device.",
                "Use it from on_fit_start on, in a callback or in the LightningModule.",
            )
        return self._controller

    @property
    def precision(self) -> Any:  # type: ignore[override] # an attribute of Lightning's, which only reads it
        """Lightning's name for the precision of now: ``"16-mixed"``, ``"bf16-mixed"`` or ``"32-true"``."""
        return _NAMES[(self._controller.config if self._controller else self.config).precision]

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Make the controller, now that the model is on its device; for a module that was here before it goes on."""
        for optimizer in optimizers:
            if isinstance(optimizer, LBFGS):
                raise InvalidRequestError(
                    "LBFGS evaluates the loss several times in a step, which no loss scaler can follow.",
                    "Use another optimizer, or train without AutotunePrecision.",
                )
        module = unwrap(model)
        assert isinstance(module, LightningModule)
        before = self._controller.state_dict() if self._controller is not None and self._module is module else None
        self._module = module
        self._unscaled.clear()
        self._has_stepped = False
        self._controller = PrecisionController(self.config, module.trainer.strategy.root_device, **self._options)
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined] # set without a type
        if self._latest not in callbacks:
            callbacks.append(self._latest)
        self._controller.attach(model, self._loss_again if can_run_again(module) else None)
        if before is not None:
            self.load_state_dict(before)
        return model, optimizers, lr_schedulers

    def _loss_again(self) -> Tensor:
        assert self._module is not None
        return loss_again(self._module, self._latest)

    def _refuse_other_batches(self) -> None:
        """Raise `DemotedError` in a rung that was measured with another batch size or accumulation."""
        own, plan = self.config, self.controller.config
        if (plan.batch_size, plan.accumulation_steps) == (own.batch_size, own.accumulation_steps):
            return
        history = self.controller.status().history
        move = next(record for record in reversed(history) if record.before != record.after == plan.precision)
        raise DemotedError(
            f"The precision went from {move.before} to {move.after}: {move.reason}. It was measured with batch size "
            f"{plan.batch_size} and {plan.accumulation_steps} accumulation steps, not {own.batch_size} and "
            f"{own.accumulation_steps}, and a running Trainer cannot change its DataLoader.",
            "Resume the checkpoint with a Trainer and a DataLoader made from the error's config; AutotuneCallback "
            "saves one.",
            plan,
        )

    def _autocast(self) -> AbstractContextManager[object]:
        try:
            context = self.controller.autocast()
            self._refuse_other_batches()
        except TrainingStoppedError as error:  # of a move that waited for the end of a manual training_step
            self._hand_over(error)
            context = self.controller.autocast()
        return context

    def _end_window(self, end: Callable[[], object]) -> None:
        self._unscaled.clear()
        self._has_stepped = False
        self.handing_over(end)

    def handing_over(self, action: Callable[[], object]) -> None:
        """Do what may move the controller; where that ends the run, the `stop_handler` gets the error, if there is one.

        Outside of accumulation windows. Raises the errors of `TrainingStoppedError` without a `stop_handler`.
        """
        try:
            action()
            self._refuse_other_batches()
        except TrainingStoppedError as error:
            self._hand_over(error)

    def _hand_over(self, error: TrainingStoppedError) -> None:
        if self.stop_handler is None:
            raise error
        self.stop_handler(error)

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """The forward pass of training; with manual optimization all of the step."""
        with self._autocast():
            yield
        if self._has_stepped:
            self._end_window(self.controller.update)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The forward pass of validation, test and prediction: the precision of now, the scaler left alone."""
        with self.controller.validation():
            yield

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override] # as Lightning's
        """Scale the loss. After a step of manual optimization another backward pass begins another window."""
        if self._has_stepped:
            self._end_window(self.controller.update)
        return super().pre_backward(self.controller.scale(tensor), module)

    def optimizer_step(  # type: ignore[override] # as Lightning's
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, clip, and step unless a gradient or the loss is not finite; true if it stepped."""
        loss = closure()
        if loss is None and model.automatic_optimization:  # training_step gave None: Lightning drops the window
            self._after_closure(model, optimizer)
            self._end_window(self.controller.discard_window)
            return None
        self._unscale(optimizer)
        self._after_closure(model, optimizer)
        stepped = self.controller.step(optimizer, **kwargs)
        self._has_stepped = True
        if model.automatic_optimization:
            self._end_window(self.controller.update)
        return stepped

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip what the gradients are without the loss scale; with manual optimization before the step, too."""
        if clip_val > 0:
            self._unscale(optimizer)
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def _unscale(self, optimizer: Optimizer | LightningOptimizer) -> None:
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if id(own) not in self._unscaled:
            self._unscaled.add(id(own))
            self.controller.unscale_(own)

    def state_dict(self) -> dict[str, Any]:
        """The controller's state, for Lightning's checkpoint."""
        return {} if self._controller is None else self._controller.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the saved rung.

        Raises `FormatError` where this run's config does not have it and, before a training, `DemotedError` where it
        was measured with another batch size or accumulation.
        """
        self.controller.load_state_dict(state_dict)
        assert self._module is not None  # it came with the controller
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self._refuse_other_batches()
