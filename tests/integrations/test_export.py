"""Exported texts: what they say, and each of them run."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate_training import fresh_accelerate
from export_samples import (
    ACCUMULATED,
    CONFIGS,
    PINNED,
    exec_text,
    precision_here,
    precision_of,
    scaler_values,
    values_after,
)
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations.deepspeed import deepspeed_config
from autotune_amp.integrations.export import (
    TARGETS,
    Exportable,
    accelerate_file,
    export,
    is_exported,
)

ORIGIN = "# autotune-amp export of studies/train: measured"


class Stream(IterableDataset[Tensor]):
    """Seven batches, which nobody can count beforehand."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(7 * ACCUMULATED.batch_size, 8))


def comments(text: str) -> str:
    return " ".join(" ".join(line[2:] for line in text.splitlines() if line.startswith("# ")).split())


@pytest.mark.parametrize("config", CONFIGS, ids=precision_of)
def test_the_torch_text_trains_as_the_config_says(config: AmpConfig) -> None:
    ran = exec_text(export(Exportable(config, "cpu"), "torch").text)
    assert (ran.loader.batch_size, ran.loader.num_workers) == (config.batch_size, config.num_workers or 0)
    assert set(ran.net.batch_sizes) == {config.batch_size}
    assert {*ran.net.precisions, *ran.loss_precisions} == {config.precision}
    assert ran.num_steps == len(ran.dataset) // config.batch_size // config.accumulation_steps
    if (scale := config.loss_scale) is not None:
        assert scaler_values(ran.names["scaler"]) == values_after(scale, ran.num_steps)


@pytest.mark.parametrize("dataset", [torch.zeros(7 * ACCUMULATED.batch_size, 8), Stream()], ids=["sized", "unsized"])
def test_the_torch_text_leaves_no_gradients_behind_at_the_end_of_the_loader(dataset: Any) -> None:
    ran = exec_text(export(Exportable(ACCUMULATED, "cpu"), "torch").text, dataset=dataset)
    assert ran.net.batch_sizes == [ACCUMULATED.batch_size] * 7
    assert ran.num_steps == 4
    assert [parameter.grad for parameter in ran.net.parameters()] == [None] * 4


def test_the_torch_text_keeps_pinned_modules_in_fp32() -> None:
    ran = exec_text(export(Exportable(PINNED, "cpu"), "torch").text)
    assert ran.names["controller"].config == PINNED
    assert ran.names["controller"].status().pinned_modules == ("second",)
    assert ran.net.second_dtypes == {torch.float32}
    assert ran.num_steps == len(ran.dataset) // PINNED.batch_size // PINNED.accumulation_steps


def test_the_torch_text_of_a_loop_of_its_own() -> None:
    seen = []

    def train_step(state: Any, batch: Any, amp: Any) -> None:
        seen.append((state, len(batch), amp.config))

    text = export(Exportable(ACCUMULATED, "cpu", is_loop=True), "torch").text
    exec_text(text, train_step=train_step, state="mine")
    assert seen[0] == ("mine", ACCUMULATED.batch_size, ACCUMULATED)


@pytest.mark.parametrize("pinned_modules", [(), ("1",)])
@pytest.mark.parametrize("loss", ["mean", "sum", "weighted"])
@pytest.mark.parametrize("target", ["torch", "accelerate"])
def test_the_losses_of_a_window_add_up_to_that_of_the_whole_batch(
    target: str, loss: Any, pinned_modules: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    labels = torch.randint(3, (12,))
    if loss == "weighted":
        labels[:3] = -100
    dataset = TensorDataset(torch.randn(12, 5), labels)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    whole = copy.deepcopy(model)

    def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        reduction = "sum" if loss == "sum" else "mean"
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    config = AmpConfig(precision="fp32", batch_size=4, accumulation_steps=3, pinned_modules=pinned_modules)
    text = export(Exportable(config, "cpu", loss=loss, share="(labels != -100)"), target).text
    with fresh_accelerate():
        exec_text(
            text,
            dataset=dataset,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            compute_loss=compute_loss,
            count=lambda batch: (batch[1] != -100).sum(),
        )
    assert ("count(batch) is yours, of a batch: labels != -100." in comments(text)) == (loss == "weighted")
    compute_loss(whole, [*dataset.tensors]).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


# Every field of a config at a value that no other field has, and the words that each is to be found by.
FULL = AmpConfig(
    precision="fp16",
    batch_size=7,
    accumulation_steps=3,
    loss_scale=LossScale(init_scale=4096.0, hysteresis=2, min_scale=2.0),
    fallback=["bf16", FallbackPlan(precision="fp32", batch_size=7, accumulation_steps=3)],
    pinned_modules=("head",),
    num_workers=5,
    environment={"MALLOC_TRIM_THRESHOLD_": "2147483647"},
    as_found=True,
)
WORDS = {
    "precision": "fp16|float16",
    "batch_size": r"\b7\b",
    "accumulation_steps": r"\b3\b",
    "loss_scale": "4096|initial_scale_power.: 12",
    "fallback": "falls? ?back.*bf16.*fp32",
    "pinned_modules": "head",
    "num_workers": "num_workers=5",
    "environment": "MALLOC_TRIM_THRESHOLD_",
    "as_found": "as_found=True|they stay as they are",
}
TEXTS = [*TARGETS, "accelerate file"]


def everything(config: AmpConfig, target: str) -> str:
    """The text and the notes on one line."""
    setting = Exportable(config, "cuda")
    made = accelerate_file(setting) if target == "accelerate file" else export(setting, target)
    return " ".join(re.sub(r"\s#? *", " ", " ".join([made.text, *made.notes])).split())


@pytest.mark.parametrize("target", TEXTS)
@pytest.mark.parametrize("config", [FULL, msgspec.structs.replace(FULL, pinned_modules=())], ids=["pinned", "plain"])
def test_every_field_of_a_config_shows_in_every_text_or_its_comments(config: AmpConfig, target: str) -> None:
    assert WORDS.keys() == set(AmpConfig.__struct_fields__), "a new field is to be found here, too"
    text = everything(config, target)
    wanted = [name for name in WORDS if name != "pinned_modules" or config.pinned_modules]
    assert [name for name in wanted if not re.search(WORDS[name], text)] == []


@pytest.mark.parametrize("target", ["lightning", "transformers", "deepspeed"])
def test_where_a_trainer_divides_the_loss_the_text_says_what_to_multiply_it_by(target: str) -> None:
    said = {}
    for loss in ("mean", "sum", "weighted"):
        made = export(Exportable(ACCUMULATED, loss=loss, share="tokens"), target)
        said[loss] = " ".join([comments(made.text), *made.notes])
    assert "multiply" not in said["mean"]
    assert "multiply it by 2." in said["sum"]
    assert re.search("multiply it by 2 and by .* share of all tokens", said["weighted"])


def test_a_field_that_no_text_knows_becomes_a_comment() -> None:
    class Later(AmpConfig, frozen=True, kw_only=True):
        compile_mode: str = "none"

    config = Later(precision="bf16", batch_size=4, compile_mode="max-autotune")
    for target in ("torch", "env", "deepspeed", "accelerate file"):
        assert "compile_mode='max-autotune'" in everything(config, target).replace('"', "'")
        assert "compile_mode" not in everything(Later(precision="bf16", batch_size=4), target)


@pytest.mark.parametrize("target", ["torch", "transformers", "lightning"])
def test_tf32_is_asked_for_and_the_flags_that_were_found_are_left_alone(target: str) -> None:
    wanted, left = {
        "torch": ("allow_tf32 = True", "they stay as they are"),
        "transformers": ("tf32=True", "as_found=True"),
        "lightning": ('precision="tf32"', "as_found=True"),
    }[target]
    tf32 = AmpConfig(precision="tf32", batch_size=4)
    assert wanted in everything(tf32, target)
    text = everything(msgspec.structs.replace(tf32, as_found=True), target)
    assert left in text
    assert "allow_tf32" not in text
    assert "tf32=" not in text


@pytest.mark.parametrize("init_scale", [2.0**20, 2.0**-10])
def test_loss_scales_are_written_exactly(init_scale: float) -> None:
    scale = LossScale(init_scale=init_scale)
    config = AmpConfig(precision="fp16", batch_size=4, loss_scale=scale)
    for target in ("torch", "accelerate", "lightning", "transformers"):
        (written,) = re.findall(r"init_scale=([-+.e\d]+)", export(Exportable(config), target).text)
        assert float(written) == init_scale
    bounds = re.findall(r"(?:min|max)_scale=([-+.e\d]+)", comments(export(Exportable(config), "torch").text))
    assert [float(bound) for bound in bounds] == [scale.floor, scale.max_scale]


def test_the_environment_reaches_a_shell() -> None:
    variables = {"OMP_NUM_THREADS": "3", "ODD_": "a 'quoted' $value"}
    text = export(Exportable(AmpConfig(precision="fp32", batch_size=4, environment=variables)), "env").text
    program = f'{text}printf \'%s|%s\' "$OMP_NUM_THREADS" "$ODD_"'
    done = subprocess.run(["/bin/sh", "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.split("|") == list(variables.values())
    assert export(Exportable(AmpConfig(precision="fp32", batch_size=4)), "env").text.startswith("# ")


@pytest.mark.parametrize("config", [*CONFIGS, PINNED], ids=["fp32", "bf16", "fp16", "pinned"])
def test_every_text_says_where_it_comes_from(config: AmpConfig) -> None:
    setting = Exportable(config, "cpu", origin="studies/train: measured")
    for target in TARGETS:
        made = export(setting, target)
        assert (made.notes[0] if target == "deepspeed" else made.text.splitlines()[0]) == (
            "studies/train: measured." if target == "deepspeed" else ORIGIN
        )
        assert is_exported(made.text)
        assert ("DataLoader(" in made.text) == ("collate_fn" in made.text)
    assert accelerate_file(setting).text.startswith(f"{ORIGIN}\n")
    assert is_exported(export(Exportable(config, "cpu", origin="long/" * 40), "torch").text)


@pytest.mark.parametrize(
    "text",
    ["", "import torch\n", f"import torch\n{ORIGIN}\n", "[]", '{"train_micro_batch_size_per_gpu": 8, "optimizer": {}}'],
)
def test_other_files_are_no_exports(text: str) -> None:
    assert not is_exported(text)


def test_where_the_frameworks_module_holds_the_model_the_text_says_what_becomes_of_its_pins() -> None:
    for target, holder in (("lightning", "the LightningModule"), ("transformers", "`model`")):
        said = comments(export(Exportable(PINNED, "cpu"), target).text)
        assert f"Where {holder} holds that model as an attribute" in said
        assert 'put it before them: "net.second".' in said
        assert "pinned_modules" not in comments(export(Exportable(ACCUMULATED, "cpu"), target).text)
    for target in ("torch", "accelerate"):
        assert "pinned_modules" not in comments(export(Exportable(PINNED, "cpu"), target).text)


def test_a_launch_file_says_what_a_plain_accelerator_would_do_under_it() -> None:
    pinned = accelerate_file(Exportable(PINNED, "cpu"))
    (note,) = pinned.notes
    assert re.search("cannot train fp16 on cpu with second in fp32.*trains all in fp32", note)
    assert "AutotuneAccelerator" in comments(pinned.text)
    assert 'mixed_precision: "no"\n' in pinned.text
    plain = accelerate_file(Exportable(msgspec.structs.replace(PINNED, pinned_modules=())))
    assert plain.notes == ()
    assert 'mixed_precision: "fp16"\n' in plain.text


def deepspeed_said(**options: Any) -> tuple[dict[str, Any], str]:
    config = AmpConfig(precision="fp16", batch_size=8, accumulation_steps=4, loss_scale=LossScale(**options))
    made = export(Exportable(config, loss="sum"), "deepspeed")
    return json.loads(made.text), " ".join(made.notes)


def test_deepspeeds_json_and_what_it_rounds() -> None:
    document, said = deepspeed_said(
        init_scale=3000.0, growth_interval=50, hysteresis=2, min_scale=2.0, growth_factor=4.0
    )
    assert document["fp16"] == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 11,
        "loss_scale_window": 50,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 2,
    }
    assert (document["train_micro_batch_size_per_gpu"], document["gradient_accumulation_steps"]) == (8, 4)
    assert "init_scale 3000.0 is rounded down to a power of two, 2048.0." in said
    assert "growth_factor 4.0 has no key: it is 2.0." in said
    assert "max_scale 16777216.0 has no key" in said
    assert "min_scale" not in said
    assert "multiply it by 4" in said
    document, said = deepspeed_said(init_scale=2.0**20, min_scale=2.0**-10)
    assert (document["fp16"]["initial_scale_power"], document["fp16"]["min_loss_scale"]) == (20, 1)
    assert "min_scale 0.0009765625 becomes 1" in said
    assert "min_scale 0.015625 becomes 1" in deepspeed_said(init_scale=64.0)[1]  # its floor
    with pytest.raises(InvalidRequestError, match="its least scale is 1"):
        deepspeed_said(init_scale=2.0**-10)
    assert deepspeed_config(ACCUMULATED)["bf16"] == {"enabled": True}


@pytest.mark.parametrize("config", [CONFIGS[0], ACCUMULATED, PINNED], ids=precision_of)
def test_deepspeeds_own_classes_read_it(config: AmpConfig) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed has no wheel; pip install 'autotune_amp[deepspeed]' builds it")
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig(deepspeed_config(config))
    sizes = (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps, read.train_batch_size)
    assert sizes == (config.batch_size, config.accumulation_steps, config.batch_size * config.accumulation_steps)
    enabled = (read.float16_config.enabled, read.bfloat16_config.enabled)
    assert enabled == (config.precision == "fp16", config.precision == "bf16")
    if (scale := config.loss_scale) is not None:
        arguments = read.float16_config.dynamic_loss_scale_args()
        assert sorted(arguments.values()) == sorted(
            [scale.init_scale, scale.growth_interval, scale.hysteresis, False, scale.floor]
        )


def test_what_cannot_be_exported_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no export to 'keras'") as raised:
        export(Exportable(ACCUMULATED), "keras")
    assert all(target in raised.value.next_step for target in TARGETS)
    fp8 = AmpConfig(precision="fp8", batch_size=4)
    for target in set(TARGETS) - {"env"}:
        with pytest.raises(InvalidRequestError, match="fp8"):
            export(Exportable(fp8), target)
    with pytest.raises(InvalidRequestError, match="fp8"):
        accelerate_file(Exportable(fp8))
    for target in ("lightning", "transformers", "deepspeed"):
        with pytest.raises(InvalidRequestError, match=f"no export to {target} of a training") as raised:
            export(Exportable(ACCUMULATED, is_loop=True), target)
        assert "--to torch or --to accelerate" in raised.value.next_step


def test_rendering_imports_no_framework() -> None:
    program = (
        "import sys\n"
        "from autotune_amp.core.config import AmpConfig, LossScale\n"
        "from autotune_amp.integrations.export import TARGETS, accelerate_file, export\n"
        "from autotune_amp.integrations.export import Exportable\n"
        "config = AmpConfig(precision='fp16', batch_size=4, loss_scale=LossScale())\n"
        "for target in TARGETS: assert export(Exportable(config), target).text\n"
        "assert accelerate_file(Exportable(config)).text\n"
        "print({'torch', 'accelerate', 'lightning', 'transformers', 'deepspeed'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # trainers write where they are
    with fresh_accelerate():
        yield


def num_steps(config: AmpConfig, num_samples: int = 32) -> int:
    return num_samples // config.batch_size // config.accumulation_steps


@pytest.mark.parametrize("config", [*CONFIGS, PINNED], ids=["fp32", "bf16", "fp16", "pinned"])
def test_accelerate(config: AmpConfig) -> None:
    ran = exec_text(export(Exportable(config, "cpu"), "accelerate").text)
    accelerator = ran.names["accelerator"]
    assert accelerator.device.type == "cpu"
    assert accelerator.gradient_accumulation_steps == config.accumulation_steps
    assert ran.loader.num_workers == (config.num_workers or 0)
    assert set(ran.net.batch_sizes) == {config.batch_size}
    assert {*ran.net.precisions, *ran.loss_precisions} == {config.precision}
    assert ran.num_steps == num_steps(config)
    assert accelerator.controller.config == config
    assert accelerator.controller.status().pinned_modules == config.pinned_modules
    if config.precision == "fp16":
        assert ran.net.second_dtypes == {torch.float32 if config.pinned_modules else torch.float16}
        assert scaler_values(accelerator.scaler) == values_after(config.loss_scale, ran.num_steps)


@pytest.mark.parametrize("config", CONFIGS[:2], ids=precision_of)
def test_a_plain_accelerator_takes_the_launch_file(config: AmpConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("accelerate.yaml").write_text(accelerate_file(Exportable(config, "cpu")).text)
    loaded = load_config_from_file("accelerate.yaml")
    assert (loaded.distributed_type.value, loaded.num_processes) == ("NO", 1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", loaded.mixed_precision)  # as `accelerate launch` does
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(loaded.use_cpu))
    made = Accelerator()
    assert (made.mixed_precision, made.device.type) == ({"fp32": "no"}.get(config.precision, config.precision), "cpu")


@pytest.mark.parametrize("config", [CONFIGS[1], PINNED], ids=["bf16", "pinned"])
def test_transformers(config: AmpConfig) -> None:
    pytest.importorskip("transformers")
    text = export(Exportable(config, "cpu"), "transformers").text
    samples = [
        {"inputs": sample, "labels": torch.zeros(1)}
        for sample in torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    ]
    ran = exec_text(text, dataset=samples)
    trainer = ran.names["trainer"]
    trainer.args.max_steps, trainer.args.save_strategy, trainer.args.disable_tqdm = 2, "no", True
    around_loss = set()

    def loss_of(outputs: Tensor, *_: Any, **__: Any) -> Tensor:
        around_loss.add((precision_here(), outputs.dtype))
        return outputs.float().pow(2).mean()

    trainer.compute_loss_func = loss_of
    trainer.train()
    held = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
    assert around_loss == {(config.precision, torch.float32 if config.pinned_modules else held)}  # as a trial runs it
    args = trainer.args
    assert trainer.state.global_step == 2
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (
        config.batch_size,
        config.accumulation_steps,
    )
    assert args.dataloader_num_workers == (config.num_workers or 0)
    assert (args.fp16, args.bf16, args.tf32) == (config.precision == "fp16", config.precision == "bf16", False)
    assert trainer.get_train_dataloader().num_workers == (config.num_workers or 0)
    assert set(ran.net.batch_sizes) == {config.batch_size}
    assert len(ran.net.batch_sizes) == 2 * config.accumulation_steps
    assert set(ran.net.precisions) == {config.precision}
    if config.loss_scale is not None:
        assert trainer.controller.config == config
        assert trainer.controller.status().pinned_modules == config.pinned_modules
        assert scaler_values(trainer.accelerator.scaler) == values_after(config.loss_scale, trainer.state.global_step)


PINNED_IN_A_MODULE = msgspec.structs.replace(PINNED, pinned_modules=("net.second",))


@pytest.mark.parametrize("config", [CONFIGS[2], PINNED_IN_A_MODULE], ids=["fp16", "pinned"])
@pytest.mark.slow  # importing Lightning
@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # the config decides
@pytest.mark.filterwarnings("ignore:.*number of training batches")  # it logs every 50 steps, of which there are few
@pytest.mark.filterwarnings("ignore:.*tensorboardX")  # its default logger, which is not installed
@pytest.mark.filterwarnings("ignore:.*not supported by the model summary")  # which counts fp16 as fp32
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's use of torch
def test_lightning(config: AmpConfig) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net
            self.precisions: list[str] = []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            self.precisions.append(precision_here())
            loss: Tensor = self.net(batch).float().pow(2).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.01)

    ran = exec_text(export(Exportable(config, "cpu"), "lightning").text)
    trainer, module = ran.names["trainer"], Module(ran.net)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(module, ran.loader)
    controller = trainer.precision_plugin.controller
    assert controller.config == config
    assert controller.status().pinned_modules == config.pinned_modules
    assert trainer.accumulate_grad_batches == config.accumulation_steps
    assert trainer.train_dataloader.batch_size == config.batch_size
    assert trainer.train_dataloader.num_workers == (config.num_workers or 0)
    assert trainer.global_step == num_steps(config)
    assert {*module.precisions, *ran.net.precisions} == {config.precision}
    if config.loss_scale is not None:
        assert scaler_values(controller) == values_after(config.loss_scale, trainer.global_step)
