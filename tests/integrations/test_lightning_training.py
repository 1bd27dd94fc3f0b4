"""The controller as Lightning's precision plugin, in real runs of the Trainer."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from framework_samples import QUIET, are_finite, fp16, same
from torch import nn

from autotune_amp.core.config import AmpConfig, DemotedError, FallbackPlan
from autotune_amp.core.errors import InvalidRequestError, NoRungFitsError
from autotune_amp.runtime.controller import PrecisionController

if TYPE_CHECKING:
    import lightning
    from lightning.pytorch.loggers import CSVLogger


pytestmark = QUIET
BF16, FP16 = torch.bfloat16, torch.float16


def controller_of(run: lightning.Trainer) -> PrecisionController:
    from autotune_amp.integrations.lightning import AutotunePrecision

    plugin = run.precision_plugin
    assert isinstance(plugin, AutotunePrecision)
    return plugin.controller


def rungs_in(logs: CSVLogger) -> list[str]:
    rows = [row.split(",") for row in (Path(logs.log_dir) / "metrics.csv").read_text().splitlines()]
    return list(filter(None, (row[rows[0].index("autotune_amp/rung")] for row in rows[1:])))


def test_an_overflow_in_the_middle_demotes_the_run_which_ends_finite_and_resumes_at_its_rung(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning_samples import NUM_BATCHES, Net, Validated, loader, trainer

    from autotune_amp.integrations.lightning import trainer_arguments

    net = Validated(first_large=10)
    saves = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1, save_top_k=0)
    logs = CSVLogger(tmp_path)
    run = trainer(tmp_path, **trainer_arguments(fp16(), callbacks=[saves], logger=logs, log_every_n_steps=5))
    run.fit(net, loader(), loader(2))
    status = controller_of(run).status()
    assert [(move.kind, move.before, move.after) for move in status.history] == [("demotion", "fp16", "bf16")]
    assert "first in module net.0" in status.history[0].reason, "the batch was not run again"
    assert (status.num_updates, run.precision) == (NUM_BATCHES, "bf16-mixed")
    assert are_finite(net)
    demoted = net.dtypes.index(BF16)
    assert set(net.dtypes[:10]) == {FP16}, "autocast inside the model before the overflow"
    assert set(net.dtypes[-10:]) == {BF16}, "autocast inside the model after the demotion"
    assert demoted >= 10
    assert net.validated == [FP16, FP16, BF16, BF16]  # Lightning's sanity check before the run, validation after it
    assert net.mean.update_count == NUM_BATCHES, "a batch that was run again was counted again"
    assert Counter(rungs_in(logs)) == {"0": 2, "1": 3}, "steps 5 and 10; the move, steps 15 and 20"

    assert saves.last_model_path
    resumed = Net()
    again = trainer(tmp_path, **trainer_arguments(fp16(), callbacks=[saves], max_epochs=2))
    again.fit(resumed, loader(), ckpt_path=saves.last_model_path)
    after = controller_of(again).status()
    assert set(resumed.dtypes) == {BF16}
    assert (after.precision, after.num_updates, len(resumed.dtypes)) == ("bf16", 2 * NUM_BATCHES, NUM_BATCHES)
    assert are_finite(resumed)


@pytest.mark.parametrize("config", [fp16(accumulation_steps=2), AmpConfig(precision="fp32", batch_size=4)])
def test_until_something_trips_a_run_equals_the_loop_written_by_hand(tmp_path: Path, config: AmpConfig) -> None:
    from lightning_samples import Net, loader, trainer

    from autotune_amp.integrations.lightning import trainer_arguments

    net = Net()
    run = trainer(tmp_path, **trainer_arguments(config, gradient_clip_val=0.5))
    run.fit(net, loader(5))

    plain = Net()
    steps = config.accumulation_steps
    controller = PrecisionController(config, "cpu")
    optimizer = plain.configure_optimizers()
    for index, (inputs, targets) in enumerate(loader(5)):
        with controller.autocast():
            loss = nn.functional.mse_loss(plain(inputs), targets) / steps
        controller.backward(loss)
        if (index + 1) % steps == 0 or index == 4:
            controller.unscale_(optimizer)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            controller.step(optimizer)
            controller.update()
            optimizer.zero_grad()
    assert same(net.net, plain.net)
    assert controller_of(run).status().num_steps == -(-5 // steps)
    assert not same(net.net, Net().net), "nothing was trained"


def test_a_fallback_measured_with_another_batch_size_ends_with_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger
    from lightning_samples import NUM_BATCHES, Net, loader, trainer

    from autotune_amp.integrations.lightning import AutotuneCallback, AutotunePrecision, trainer_arguments

    config = fp16(fallback=[FallbackPlan(precision="fp32", batch_size=2, accumulation_steps=2)])
    message = "batch size 2 and 2 accumulation steps, not 4 and 1"
    with pytest.raises(DemotedError, match=message):
        trainer(tmp_path, plugins=[AutotunePrecision(config)]).fit(Net(first_large=5), loader())

    net, callback, logs = Net(first_large=5), AutotuneCallback(), CSVLogger(tmp_path)
    run = trainer(tmp_path, **trainer_arguments(config, callbacks=[callback], logger=logs))
    run.fit(net, loader())
    assert callback.demotion is not None
    path = callback.checkpoint_path
    assert path == str(tmp_path / "autotune_amp.ckpt")
    assert 5 < len(net.dtypes) < NUM_BATCHES, "it went on to the end"
    assert rungs_in(logs) == ["1"], "the move that ends the run is logged"
    below = callback.demotion.config
    assert (below.precision, below.batch_size, below.accumulation_steps) == ("fp32", 2, 2)

    resumed = Net()
    again = trainer(tmp_path, **trainer_arguments(below))
    again.fit(resumed, loader(2 * NUM_BATCHES, 2), ckpt_path=path)
    assert set(resumed.dtypes) == {None}
    assert controller_of(again).status().num_updates > run.global_step
    assert are_finite(resumed)

    with pytest.raises(DemotedError, match=message):  # not with the config from before
        trainer(tmp_path, **trainer_arguments(config)).fit(Net(), loader(), ckpt_path=path)


def test_a_failure_is_diagnosed_after_a_search_for_the_learning_rate_too(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import LearningRateFinder
    from lightning_samples import Net, loader, trainer

    from autotune_amp.integrations.lightning import trainer_arguments

    net = Net(first_large=5)
    net.lr = 0.05  # type: ignore[assignment] # the finder's
    finder = LearningRateFinder(num_training_steps=10, max_lr=0.1)
    run = trainer(tmp_path, **trainer_arguments(fp16(fallback=["fp32"]), callbacks=[finder]))
    run.fit(net, loader())
    (move,) = controller_of(run).status().history
    assert (move.kind, "module net.0" in move.reason) == ("demotion", True)


def test_manual_optimization_with_two_optimizers_is_guarded_and_demoted(tmp_path: Path) -> None:
    from lightning_samples import NUM_BATCHES, Pair, loader, trainer

    from autotune_amp.integrations.lightning import trainer_arguments

    pair = Pair(first_large=6)
    run = trainer(tmp_path, **trainer_arguments(fp16(fallback=["fp32"])))
    run.fit(pair, loader())
    status = controller_of(run).status()
    assert [(move.kind, move.after) for move in status.history] == [("demotion", "fp32")]
    assert (pair.dtypes[5], pair.dtypes[-1]) == (FP16, None)
    assert set(pair.stepped[:6]) == {(True, True)}
    assert (True, False) in pair.stepped, "only the one that overflows skips"
    assert pair.stepped[-1] == (True, True)
    assert pair.moved[0] == pytest.approx(0.01 * 0.1, rel=0.1), "clipped to the norm of the scaled gradients"
    assert status.num_updates == NUM_BATCHES, "one update for each training_step"
    assert are_finite(pair)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_that_draws_its_own_batches_is_demoted_without_drawing_more(tmp_path: Path) -> None:
    from lightning_samples import NUM_BATCHES, Drawing, loader, trainer

    from autotune_amp.integrations.lightning import trainer_arguments

    drawing = Drawing(first_large=5)
    run = trainer(tmp_path, **trainer_arguments(fp16(fallback=["fp32"])))
    run.fit(drawing, loader())
    status = controller_of(run).status()
    assert [(move.kind, move.after) for move in status.history] == [("demotion", "fp32")]
    assert status.num_updates == len(drawing.dtypes) == NUM_BATCHES


def test_the_callback_warns_of_another_batch_size(tmp_path: Path) -> None:
    from lightning_samples import Net, loader, trainer

    from autotune_amp.integrations.lightning import trainer_arguments

    run = trainer(tmp_path, **trainer_arguments(fp16(batch_size=8), max_steps=1))
    with pytest.warns(UserWarning, match="batch_size.* is 4"):
        run.fit(Net(), loader())


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    from lightning_samples import Net, loader, trainer

    from autotune_amp.integrations.lightning import AutotuneCallback, AutotunePrecision, trainer_arguments

    with pytest.raises(InvalidRequestError, match="precision plugin is Precision"):
        trainer(tmp_path, callbacks=[AutotuneCallback()]).fit(Net(), loader())
    with pytest.raises(InvalidRequestError, match="precision '16-mixed' contradicts the config"):
        trainer_arguments(fp16(), precision="16-mixed")
    with pytest.raises(InvalidRequestError, match="contradicts the config"):
        trainer_arguments(fp16(), plugins=[AutotunePrecision(fp16(batch_size=8))])
    recommendation: Any = SimpleNamespace(training_config=fp16(), measured_flops=None)
    assert trainer_arguments(fp16(), plugins=AutotunePrecision(recommendation))["accumulate_grad_batches"] == 1
    measured: Any = SimpleNamespace(training_config=fp16(), measured_flops="known")
    (plugin,) = trainer_arguments(measured)["plugins"]
    assert plugin._options == {"measured_flops": "known"}
    with pytest.raises(InvalidRequestError, match="accumulate_grad_batches=4 contradicts"):
        trainer_arguments(fp16(), accumulate_grad_batches=4)
    with pytest.raises(InvalidRequestError, match="no controller yet"):
        _ = AutotunePrecision(fp16()).controller


def test_a_run_without_a_rung_left_saves_a_checkpoint_before_it_stops(tmp_path: Path) -> None:
    from lightning_samples import Net, loader, trainer

    from autotune_amp.integrations.lightning import AutotuneCallback, trainer_arguments

    callback, net = AutotuneCallback(tmp_path / "last.ckpt"), Net(first_large=5)
    run = trainer(tmp_path, **trainer_arguments(fp16(fallback=[]), callbacks=[callback]))
    with pytest.raises(NoRungFitsError, match="no rung is left"):
        run.fit(net, loader())
    assert callback.demotion is None
    assert (tmp_path / "last.ckpt").exists()


def test_the_folder_of_a_checkpoint_may_be_remote() -> None:
    from autotune_amp.integrations.lightning import AutotuneCallback

    saved: list[Any] = []
    run: Any = SimpleNamespace(
        global_step=1, log_every_n_steps=0, default_root_dir="s3://bucket/run", save_checkpoint=saved.append
    )
    for callback in (AutotuneCallback(), AutotuneCallback("s3://bucket/mine.ckpt")):
        callback.stopped = DemotedError("It stopped.", "Go on.", fp16())
        callback.on_train_batch_end(run)
        assert callback.checkpoint_path == saved[-1]
    assert saved == ["s3://bucket/run/autotune_amp.ckpt", "s3://bucket/mine.ckpt"]


def test_what_the_config_says_of_model_and_optimizer_is_set_up(tmp_path: Path) -> None:
    from lightning_samples import Net, Validated, loader, trainer

    from autotune_amp.integrations.lightning import trainer_arguments

    net = Net()
    config = AmpConfig(precision="fp32", batch_size=4, optimizer_impl="foreach")
    run = trainer(tmp_path, **trainer_arguments(config))
    run.fit(net, loader())
    assert all(group["foreach"] for optimizer in run.optimizers for group in optimizer.param_groups)
    assert are_finite(net)
    again = trainer(tmp_path, **trainer_arguments(config))
    again.fit(net, loader())  # is so already
    trainer(tmp_path, **trainer_arguments(config)).validate(Validated(), loader(1))  # which has no optimizer


def test_a_run_that_ended_leaves_the_model_and_the_handling_of_signals_as_found(tmp_path: Path) -> None:
    from lightning_samples import Validated, loader, trainer

    from autotune_amp.integrations.lightning import AutotunePrecision

    heard: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("own"))
    try:
        net = Validated()
        plugin = AutotunePrecision(fp16(pinned_modules=("net.0",)), on_signal=lambda: heard.append("saved"))
        run = trainer(tmp_path, plugins=[plugin])
        for num_epochs, num_updates in ((1, 3), (2, 6)):
            run.fit_loop.max_epochs = num_epochs
            run.fit(net, loader(3), loader(1))
            run.validate(net, loader(1), verbose=False)
            assert [type(module) for module in net.net] == [nn.Linear, nn.ReLU, nn.Linear]
            assert not net._load_state_dict_post_hooks
            status = plugin.controller.status()
            assert (status.num_updates, plugin.controller.config.pinned_modules) == (num_updates, ("net.0",))
            signal.raise_signal(signal.SIGTERM)
        assert heard == ["own", "own"]
    finally:
        signal.signal(signal.SIGTERM, before)
