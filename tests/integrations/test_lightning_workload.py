"""A Workload from a LightningModule and a DataModule: what its trials run, and what becomes of the live objects."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_samples import QUIET, same
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.setting import Setting
from autotune_amp.core.workload import Fitting, make_workload
from autotune_amp.precision import torch_state
from autotune_amp.processes.packing import pack, unpack
from autotune_amp.trial import data, worker
from autotune_amp.trial.context import Context, make_model, make_optimizer, users_optimizers
from autotune_amp.trial.jobs import Describe

pytestmark = QUIET


def test_a_trial_runs_the_modules_own_step_optimizers_and_loader() -> None:
    from lightning_samples import Data, Net, Scheduled

    live, datamodule = Scheduled(), Data()
    before = copy.deepcopy(live)
    workload = make_workload(unpack(pack(Workload.from_lightning(live, datamodule, name="mine"))), "a test")
    assert (workload.name, data.describe(workload.data)) == ("mine", ("DataLoader, 0 workers", 4, 32))
    module = make_model(workload)
    assert isinstance(module, Scheduled)
    (optimizer,) = users_optimizers(make_optimizer(workload, module))
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in module.parameters()}
    assert (type(optimizer), optimizer.param_groups[0]["max_lr"]) == (torch.optim.AdamW, 0.1)
    batch = next(data.stream(workload.data, 16))
    assert batch[0].shape == (16, 8)
    assert workload.loss is not None
    loss = workload.loss(module, batch)
    expected = nn.functional.mse_loss(Net()(batch[0] * 2), batch[1])
    assert torch.equal(loss, expected)
    loss.backward()
    optimizer.step()
    assert not same(module.net, live.net)
    assert same(live, before)
    assert live._trainer is None
    assert datamodule.trainer is None
    assert not hasattr(datamodule, "samples")


def test_a_module_may_ask_its_trainer_and_a_warm_up_begins_at_a_tenth_of_its_peak() -> None:
    from lightning_samples import Asking, Counted

    workload = make_workload(unpack(pack(Workload.from_lightning(Asking(), Counted()))), "a test")
    module: Any = make_model(workload)
    (optimizer,) = users_optimizers(make_optimizer(workload, module))
    assert module.num_inputs == 8
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02)


def test_what_is_no_training_of_lightnings_is_refused() -> None:
    from lightning_samples import Data, Net

    class Several(Data):
        def train_dataloader(self) -> Any:
            return [super().train_dataloader()] * 2

    with pytest.raises(WorkloadError, match="returned several loaders, as a list"):
        Workload.from_lightning(Net(), Several())
    with pytest.raises(WorkloadError, match=r"needs a LightningModule .*, not .*str"):
        Workload.from_lightning("Net", Data())
    with pytest.raises(WorkloadError, match="needs a LightningModule"):
        make_model(Workload.from_lightning(lambda: nn.Linear(1, 1), Data()))
    by_hand = Net()
    by_hand.automatic_optimization = False
    with pytest.raises(WorkloadError, match="manual optimization") as raised:
        Workload.from_lightning(by_hand, Data())
    assert "train_step" in raised.value.next_step


def test_a_trainer_that_converts_the_module_is_refused_unless_the_precision_is_given(tmp_path: Path) -> None:
    from lightning_samples import Data, Net, trainer

    with pytest.raises(WorkloadError, match=r"precision='bf16-true'") as raised:
        Workload.from_lightning(Net(), Data(), trainer(tmp_path, precision="bf16-true"))
    assert 'from_lightning(..., precision="fp32")' in raised.value.next_step
    for name, precision in (("32-true", None), ("bf16-mixed", "bf16")):
        assert Workload.from_lightning(Net(), Data(), trainer(tmp_path, precision=name)).precision == precision
    given = Workload.from_lightning(Net(), Data(), trainer(tmp_path, precision="64-true"), precision="fp32")
    assert given.precision == "fp32"


def test_a_plugin_that_converts_the_module_is_refused_though_its_precision_is_32_true(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.precision import Precision
    from lightning_samples import Data, Net, trainer

    class Quantized(Precision):
        pass

    with pytest.raises(WorkloadError, match=r"Quantized"):
        Workload.from_lightning(Net(), Data(), trainer(tmp_path, plugins=[Quantized()]))


@pytest.mark.parametrize(("is_fused", "clips"), [(True, True), (True, False), (False, True)])
def test_lightnings_own_precision_is_measured_unless_it_refuses_to_clip(is_fused: bool, clips: bool) -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    from autotune_amp.integrations.lightning import AutotunePrecision
    from autotune_amp.integrations.lightning_workload import _precision_plugins

    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused)
    setting = Setting(precision="bf16", batch_size=4)
    fitting = Fitting(model, optimizer, None, setting, None, None, lambda loss, num_batches: None)
    (plugin,) = _precision_plugins(fitting, torch.device("cpu"), clips=clips)
    assert type(plugin) is (AutotunePrecision if is_fused and clips else MixedPrecision)


@pytest.mark.parametrize("hook", ["configure_gradient_clipping", "on_before_optimizer_step", "optimizer_step"])
def test_a_module_that_may_clip_in_a_hook_is_taken_to_clip(hook: str) -> None:
    from lightning_samples import Data, Net

    from autotune_amp.integrations.lightning_workload import _TrainerFunctions

    class Clipping(Net):
        pass

    setattr(Clipping, hook, lambda *_, **__: None)
    functions = _TrainerFunctions(Clipping(), None, Data(), {})
    assert functions._clips(Clipping())
    assert not functions._clips(Net())


def test_a_trainer_of_several_devices_is_known_and_one_that_divides_the_model_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning_samples import Data, Net, trainer

    live = trainer(tmp_path, devices=2, num_nodes=2, strategy="ddp")
    workload = make_workload(unpack(pack(Workload.from_lightning(Net(), Data(), live))), "a test")
    spec = Describe(device="cpu", torch_state=torch_state.capture())
    assert worker.describe(Context(workload), spec, lambda event: None).trainer_ranks == 4
    divided = trainer(tmp_path, devices=2, strategy=ModelParallelStrategy())
    with pytest.raises(WorkloadError, match="uses ModelParallelStrategy"):
        Workload.from_lightning(Net(), Data(), divided)
