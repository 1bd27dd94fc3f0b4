from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_training import Net, batches_of, fresh_accelerate, inputs, loss_of, reset
from framework_samples import are_finite, fp16, same
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autotune_amp.core.config import AmpConfig, DemotedError, FallbackPlan, LossScale
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.precision.forward_wrapper import is_pinned, wrappers_of
from autotune_amp.runtime.controller import PrecisionController


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    pytest.importorskip("accelerate")
    with fresh_accelerate():
        yield


class Run:
    """A loop as Accelerate's documentation writes it."""

    def __init__(self, config: AmpConfig, *, uses_windows: bool = False, clips: bool = False, **options: Any) -> None:
        from autotune_amp.integrations.accelerate import AutotuneAccelerator

        reset()
        self.accelerator = AutotuneAccelerator(config, cpu=True, rerun=self.loss, **options)
        self.net = Net()
        self.uses_windows, self.clips = uses_windows, clips
        self.model: Any = None
        self.batch = torch.empty(0)

    def loss(self) -> Tensor:
        return loss_of(self.model, self.batch)

    def prepared(self, samples: Any) -> Any:
        optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        loader: Any = DataLoader(samples, batch_size=4)
        self.model, self.optimizer, loader = self.accelerator.prepare(self.net, optimizer, loader)
        return loader

    def over(self, samples: Tensor) -> Run:
        return self.train(self.prepared(samples))

    def train(self, loader: Any) -> Run:
        accelerator = self.accelerator
        for batch in accelerator.windows(loader) if self.uses_windows else loader:
            self.batch = batch
            with accelerator.accumulate(self.model):
                accelerator.backward(self.loss())
                if self.clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self


def by_hand(config: AmpConfig, samples: Tensor, max_norm: float) -> nn.Module:
    """The same training in a loop of its own."""
    net = Net()
    controller = PrecisionController(config, "cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    controller.attach(net)
    for batch, is_last in controller.windows(batches_of(samples)):
        with controller.autocast():
            outputs = net(batch)
        loss = nn.functional.mse_loss(outputs.float(), batch[:, :4].sign())
        controller.backward(loss / controller.window_size)
        if is_last:
            controller.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            controller.step(optimizer)
            controller.update()
            optimizer.zero_grad()
    return net


def test_an_overflow_in_the_middle_demotes_and_the_checkpoint_goes_on_at_the_rung(tmp_path: Path) -> None:
    run = Run(fp16("fp32")).over(inputs(20, overflowing=range(8, 12)))
    status = run.accelerator.controller.status()
    (move,) = status.history
    assert move.kind == "demotion"
    assert "first in module first" in move.reason  # by the rerun
    assert (run.net.dtypes[0], run.net.dtypes[-1]) == (torch.float16, torch.float32)
    assert are_finite(run.net)
    assert not same(run.net, Net())
    run.accelerator.save_state(str(tmp_path))

    resumed = Run(fp16("fp32"))
    resumed.prepared(inputs(4))
    resumed.accelerator.load_state(str(tmp_path))
    found = resumed.accelerator.controller.status()
    assert (found.precision, found.num_updates, found.history) == ("fp32", status.num_updates, status.history)
    resumed.batch = inputs(1)
    resumed.accelerator.backward(resumed.loss())
    assert resumed.net.dtypes[-1] == torch.float32
    assert same(run.net, resumed.net)


@pytest.mark.parametrize(
    ("precision", "num_batches", "uses_windows"), [("bf16", 24, False), ("fp16", 24, False), ("bf16", 23, True)]
)
def test_it_trains_bit_for_bit_as_the_controller_does_by_hand(
    precision: Any, num_batches: int, uses_windows: bool
) -> None:
    scale = LossScale(init_scale=2.0**22, growth_interval=2) if precision == "fp16" else None  # overflows at first
    config = AmpConfig(precision=precision, batch_size=4, accumulation_steps=2, loss_scale=scale)
    samples = inputs(num_batches)
    run = Run(config, clips=True, uses_windows=uses_windows).over(samples)
    assert set(run.net.dtypes) == {torch.float16 if precision == "fp16" else torch.bfloat16}
    assert run.accelerator.controller.status().num_updates == 12
    assert same(run.net, by_hand(config, samples, 0.5))


def test_a_step_that_the_loop_leaves_out_after_clipping_does_not_touch_the_next() -> None:
    run = Run(AmpConfig(precision="bf16", batch_size=4))
    first, spike, bad = batches_of(inputs(3))
    run.prepared(first)
    for batch in (first, spike, bad * torch.nan, first):
        run.batch = batch
        run.accelerator.backward(run.loss())
        run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
        if batch is not spike:
            run.optimizer.step()
        run.optimizer.zero_grad()
    assert are_finite(run.net)
    assert run.accelerator.controller.status().num_steps == 2


def test_two_optimizers_of_one_backward_pass_step_at_the_same_scale_as_one_would() -> None:
    """The scale grows at every update: after the first of the two the second would unscale by too much."""
    from autotune_amp.integrations.accelerate import AutotuneAccelerator

    config = fp16(loss_scale=LossScale(init_scale=4.0, growth_interval=1, max_scale=64.0), fallback=[])
    together, apart = Net(), Net()
    for net, parts in ((together, [together]), (apart, [apart.first, apart.second])):
        reset()
        accelerator = AutotuneAccelerator(config, cpu=True)
        model, *optimizers = accelerator.prepare(net, *(torch.optim.SGD(p.parameters(), lr=0.1) for p in parts))
        for batch in batches_of(inputs(8)):
            accelerator.backward(loss_of(model, batch))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.controller.status().num_updates == 8
    assert same(together, apart)


def test_signals_are_the_controllers_from_prepare_to_the_end_of_training() -> None:
    heard: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("own"))
    try:
        run = Run(fp16(), controller_options={"on_signal": lambda: heard.append("saved")})
        signal.raise_signal(signal.SIGTERM)
        loader = run.prepared(inputs(2))
        signal.raise_signal(signal.SIGTERM)
        run.train(loader)
        run.accelerator.free_memory()
        signal.raise_signal(signal.SIGTERM)
        run.prepared(inputs(2))
        run.accelerator.end_training()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["own", "saved", "own", "own"]


@pytest.mark.slow
def test_what_is_prepared_after_free_memory_begins_anew() -> None:
    from autotune_amp.integrations.accelerate import AutotuneAccelerator

    config = fp16(pinned_modules=["second"], fallback=["bf16"])
    accelerator = AutotuneAccelerator(config, cpu=True)
    for overflowing in (range(2, 5), range(0)):
        net = Net()
        reference = weakref.ref(net)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
        assert [name for name, module in net.named_modules() if is_pinned(module)] == ["second"]
        for batch in batches_of(inputs(8, overflowing=overflowing)):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        status = accelerator.controller.status()
        assert status.num_updates == 8
        assert (status.precision, len(status.history)) == (("bf16", 1) if overflowing else ("fp16", 0))
        accelerator.free_memory()
        assert [type(module) for module in net.modules()] == [Net, nn.Linear, nn.Linear]
        assert not any(any(wrappers_of(module)) for module in net.modules())
        del net, model, optimizer
        gc.collect()
        assert reference() is None


def test_windows_take_up_the_batch_size_of_a_fallback() -> None:
    plan = FallbackPlan(precision="fp32", batch_size=2, accumulation_steps=4)
    config = fp16(accumulation_steps=2, fallback=[plan])
    samples = inputs(24, overflowing=range(8, 16))
    run = Run(config, uses_windows=True).over(samples)
    assert (run.net.dtypes[-1], run.net.batch_sizes[0], run.net.batch_sizes[-1]) == (torch.float32, 4, 2)
    assert run.accelerator.controller.status().num_updates == 12
    with pytest.raises(DemotedError, match="batch size 2") as raised:
        Run(config).over(samples)
    assert (raised.value.config.batch_size, raised.value.config.accumulation_steps) == (2, 4)


def test_evaluation_and_blocks_with_autocast_off() -> None:
    from accelerate.utils import AutocastKwargs

    run = Run(fp16("fp32"))
    run.prepared(inputs(4))
    with run.accelerator.autocast():
        assert (inputs(1) @ run.net.first.weight.T).dtype == torch.float16
        with run.accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (inputs(1) @ run.net.first.weight.T).dtype == torch.float32
        assert run.model(inputs(1)).dtype == torch.float16  # as in a trial
        with torch.no_grad():
            assert run.model(inputs(1)).dtype == torch.float32
    assert run.model(inputs(1)).dtype == torch.float32
    assert run.net.dtypes[-1] == torch.float16
    run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)(inputs(1))
    assert run.net.dtypes[-1] == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "bf16"}, "mixed_precision='bf16' contradicts.*'fp16'"),
        ({"mixed_precision": "no"}, "mixed_precision='no' contradicts"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps=3 contradicts"),
    ],
)
def test_what_contradicts_the_config_is_refused(options: dict[str, Any], message: str) -> None:
    from autotune_amp.integrations.accelerate import AutotuneAccelerator

    with pytest.raises(InvalidRequestError, match=message):
        AutotuneAccelerator(fp16("fp32"), cpu=True, **options)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_accelerates_own_name_for_a_precision_without_autocast_is_taken(precision: Any) -> None:
    from autotune_amp.integrations.accelerate import AutotuneAccelerator

    config = AmpConfig(precision=precision, batch_size=4)
    made = AutotuneAccelerator(config, cpu=True, mixed_precision="no")
    assert made.controller.config == config


def test_a_scaler_of_ones_own_is_refused() -> None:
    from accelerate.utils import GradScalerKwargs

    from autotune_amp.integrations.accelerate import AutotuneAccelerator

    with pytest.raises(InvalidRequestError, match="GradScalerKwargs"):
        AutotuneAccelerator(fp16("fp32"), cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=2.0)])


def test_clipping_inside_an_accumulation_window_is_refused() -> None:
    run = Run(fp16(accumulation_steps=2))
    run.prepared(inputs(4))
    with run.accelerator.accumulate(run.model), pytest.raises(InvalidRequestError, match="sync_gradients"):
        run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)


def test_metrics_are_gathered_in_an_evaluation_in_windows_and_not_of_batches_that_are_fetched_ahead() -> None:
    from autotune_amp.integrations.accelerate import AutotuneAccelerator

    accelerator = AutotuneAccelerator(AmpConfig(precision="fp32", batch_size=4, accumulation_steps=3), cpu=True)
    training: Any = inputs(6)[:22]  # of which Accelerate itself would cut those to the last one's 2
    evaluated: Any = inputs(3)[:10]
    loader, evaluation = accelerator.prepare(DataLoader(training, batch_size=4), DataLoader(evaluated, batch_size=4))
    for batch in accelerator.windows(loader):
        assert [len(accelerator.gather_for_metrics(some)) for some in evaluation] == [4, 4, 2]
        with pytest.raises(InvalidRequestError, match="gather_for_metrics") as raised:
            accelerator.gather_for_metrics(batch)
        assert "gather()" in raised.value.next_step
