"""Lightning runs that stop, that resume at another rung, and that lose a window."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning_samples import NUM_BATCHES, Net, Validated, are_finite, fp16, loader, trainer
from torch import Tensor

from autotune_amp.core.config import DemotedError, FallbackPlan
from autotune_amp.core.errors import InvalidRequestError, NoRungFitsError
from autotune_amp.integrations.lightning import AutotuneCallback, AutotunePrecision, trainer_arguments
from autotune_amp.runtime import run_log
from autotune_amp.runtime.actions import Action, Demote, Stop
from autotune_amp.runtime.gradient_check import CLEAN

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers which may be a bottleneck"),  # tiny data on purpose
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),  # Lightning under this torch
    pytest.mark.filterwarnings("ignore:GPU available but not used"),  # as asked for here
    pytest.mark.filterwarnings("ignore:The number of training batches"),  # and fewer than its logging interval
]


def controller_of(run: Any) -> Any:
    return run.precision_plugin.controller


def test_a_checkpoint_of_a_rung_with_another_batch_is_not_resumed_with_the_config_from_before(tmp_path: Path) -> None:
    config = fp16(fallback=[FallbackPlan(precision="fp32", batch_size=2, accumulation_steps=2)])
    callback, logs = AutotuneCallback(), CSVLogger(tmp_path)
    run = trainer(tmp_path, **trainer_arguments(config, callbacks=[callback], logger=logs))
    run.fit(Net(first_large=5), loader())
    rows = [row.split(",") for row in (Path(logs.log_dir) / "metrics.csv").read_text().splitlines()]
    rungs = [row[rows[0].index("autotune_amp/rung")] for row in rows[1:]]
    assert list(filter(None, rungs)) == ["1"], "the move that ends the run is logged"

    path, net, validated = callback.checkpoint_path, Net(), Validated()
    again = trainer(tmp_path, **trainer_arguments(config))
    with pytest.raises(DemotedError, match="batch size 2 and 2 accumulation steps, not 4 and 1") as raised:
        again.fit(net, loader(), ckpt_path=path)
    assert (raised.value.config.precision, raised.value.config.batch_size, net.dtypes) == ("fp32", 2, [])
    with pytest.raises(DemotedError, match="batch size 2"):
        run.fit(net, loader(), ckpt_path=path)
    trainer(tmp_path, **trainer_arguments(config)).validate(validated, loader(1), ckpt_path=path, verbose=False)
    assert validated.validated == [None], "in fp32"


class Dropping(Net):
    """Returns None in batch 3, after a loss in batch 2 that is not finite."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (torch.inf if batch_idx == 2 else 1.0)
        return loss if batch_idx != 3 else None  # type: ignore[return-value] # which Lightning allows


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # on purpose
def test_a_window_that_training_step_drops_does_not_spoil_the_next(tmp_path: Path) -> None:
    net = Dropping()
    run = trainer(tmp_path, **trainer_arguments(fp16(accumulation_steps=2)))
    run.fit(net, loader(8))
    status = controller_of(run).status()
    assert (status.num_updates, status.num_steps, status.num_skips) == (3, 3, 0)
    assert are_finite(net.net)


class FirstOfTwo(Net):
    """From batch 8 on the first pass of every window is past fp16's range."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.first_large = 8 if batch_idx % 2 == 0 else 100
        return super().training_step(batch, batch_idx)


def test_an_overflow_in_the_first_pass_of_a_window_demotes_at_once(tmp_path: Path) -> None:
    net = FirstOfTwo()
    run = trainer(tmp_path, **trainer_arguments(fp16(accumulation_steps=2)))
    run.fit(net, loader(16))
    (move,) = controller_of(run).status().history
    assert (move.kind, move.update, move.after) == ("demotion", 6, "bf16")
    assert are_finite(net)


def test_a_run_without_a_rung_left_saves_a_checkpoint_before_it_stops(tmp_path: Path) -> None:
    callback, net = AutotuneCallback(tmp_path / "last.ckpt"), Net(first_large=5)
    run = trainer(tmp_path, **trainer_arguments(fp16(fallback=[]), callbacks=[callback]))
    with pytest.raises(NoRungFitsError, match="no rung is left"):
        run.fit(net, loader())
    assert callback.demotion is None
    assert (tmp_path / "last.ckpt").exists()
    assert run.precision_plugin.stop_handler is None  # type: ignore[attr-defined]
    with pytest.raises(NoRungFitsError):
        trainer(tmp_path, plugins=[AutotunePrecision(fp16(fallback=[]))]).fit(Net(first_large=5), loader())


class Late(Callback):
    """Has batch 3's verdict still on its way when the batch ends, as behind a fused optimizer; it asks for `action`."""

    def __init__(self, action: Action) -> None:
        self.action = action

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            controller = controller_of(trainer)
            controller._scaler.reader.push([torch.tensor(float(CLEAN)), torch.tensor(1.0)], (0,))
            controller._executor.ask(self.action)


@pytest.mark.parametrize("is_demotion", [False, True])
def test_an_end_that_is_found_while_logging_saves_a_checkpoint_too(tmp_path: Path, is_demotion: bool) -> None:
    config = fp16(fallback=[FallbackPlan(precision="fp32", batch_size=2, accumulation_steps=2)])
    action: Action = Stop("no rung is left", is_precision=True)
    if is_demotion:
        action = Demote(1, "it came late", is_tentative=False)
    callback = AutotuneCallback(tmp_path / "late.ckpt")
    arguments = trainer_arguments(config, callbacks=[Late(action), callback], log_every_n_steps=1)
    run = trainer(tmp_path, **arguments)
    with nullcontext() if is_demotion else pytest.raises(NoRungFitsError, match="no rung is left"):
        run.fit(Net(), loader())
    assert (callback.demotion is not None) == is_demotion
    assert run.global_step == 4
    assert (tmp_path / "late.ckpt").exists()


def test_arguments_with_a_plugin_for_another_config_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="an AutotunePrecision for another config"):
        trainer_arguments(fp16(), plugins=[AutotunePrecision(fp16(batch_size=8))])
    recommendation: Any = SimpleNamespace(config=fp16())
    assert trainer_arguments(fp16(), plugins=AutotunePrecision(recommendation))["accumulate_grad_batches"] == 1


def test_the_controllers_options_reach_it(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    plugin = AutotunePrecision(fp16(), run_log=log, halt=False)
    run = trainer(tmp_path, **trainer_arguments(fp16(), plugins=[plugin]))
    run.fit(Net(first_large=4, factor=float("nan")), loader())
    assert run.precision_plugin is plugin
    assert plugin.controller.status().num_skips == NUM_BATCHES - 4  # it goes on, where it would stop after ten
    assert run_log.read(log).begin.config == fp16()


@pytest.mark.filterwarnings("ignore")  # of importing it
def test_the_trainer_of_pytorch_lightning_says_whose_plugin_it_was_given(tmp_path: Path) -> None:
    standalone = pytest.importorskip("pytorch_lightning")
    with pytest.raises(
        Exception, match=r"plugin AutotunePrecision\(fp16\), which is for `import lightning`, not pytorch"
    ):
        standalone.Trainer(**trainer_arguments(fp16()), accelerator="cpu", logger=False, default_root_dir=tmp_path)
