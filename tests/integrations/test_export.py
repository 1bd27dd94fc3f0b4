"""The texts themselves, and those in plain PyTorch and for the shell run."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from accelerate_training import fresh_accelerate
from export_samples import ACCUMULATED, CONFIGS, PINNED, exec_text, precision_of, scaler_values, values_after
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations.export import TARGETS, accelerate_file, export, is_exported
from autotune_amp.integrations.export_script import Setting

ORIGIN = "# autotune-amp export of studies/train: measured"


class Stream(IterableDataset[Tensor]):
    """Seven batches, which nobody can count beforehand."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(7 * ACCUMULATED.batch_size, 8))


def comments(text: str) -> str:
    return " ".join(" ".join(line[2:] for line in text.splitlines() if line.startswith("# ")).split())


@pytest.mark.parametrize("config", CONFIGS, ids=precision_of)
def test_the_torch_text_trains_as_the_config_says(config: AmpConfig) -> None:
    ran = exec_text(export(Setting(config, "cpu"), "torch").text)
    assert (ran.loader.batch_size, ran.loader.num_workers) == (config.batch_size, config.num_workers or 0)
    assert set(ran.net.batch_sizes) == {config.batch_size}
    assert {*ran.net.precisions, *ran.loss_precisions} == {config.precision}
    assert ran.num_steps == len(ran.dataset) // config.batch_size // config.accumulation_steps
    if (scale := config.loss_scale) is not None:
        assert scaler_values(ran.names["scaler"]) == values_after(scale, ran.num_steps)


@pytest.mark.parametrize("dataset", [torch.zeros(7 * ACCUMULATED.batch_size, 8), Stream()], ids=["sized", "unsized"])
def test_the_torch_text_leaves_no_gradients_behind_at_the_end_of_the_loader(dataset: Any) -> None:
    ran = exec_text(export(Setting(ACCUMULATED, "cpu"), "torch").text, dataset=dataset)
    assert ran.net.batch_sizes == [ACCUMULATED.batch_size] * 7
    assert ran.num_steps == 4
    assert [parameter.grad for parameter in ran.net.parameters()] == [None] * 4


def test_the_torch_text_keeps_pinned_modules_in_fp32() -> None:
    ran = exec_text(export(Setting(PINNED, "cpu"), "torch").text)
    assert ran.names["controller"].config == PINNED
    assert ran.names["controller"].status().pinned_modules == ("second",)
    assert ran.net.second_dtypes == {torch.float32}
    assert ran.num_steps == len(ran.dataset) // PINNED.batch_size // PINNED.accumulation_steps


def test_the_torch_text_of_a_loop_of_its_own() -> None:
    seen = []

    def train_step(state: Any, batch: Any, amp: Any) -> None:
        seen.append((state, len(batch), amp.config))

    text = export(Setting(ACCUMULATED, "cpu", is_loop=True), "torch").text
    exec_text(text, train_step=train_step, state="mine")
    assert seen[0] == ("mine", ACCUMULATED.batch_size, ACCUMULATED)


@pytest.mark.parametrize("pinned_modules", [(), ("1",)])
@pytest.mark.parametrize("loss", ["mean", "sum", "weighted"])
@pytest.mark.parametrize("target", ["torch", "accelerate"])
def test_the_losses_of_a_window_add_up_to_that_of_the_whole_batch(
    target: str, loss: Any, pinned_modules: tuple[str, ...]
) -> None:
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
    text = export(Setting(config, "cpu", loss=loss, share="(labels != -100)"), target).text
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


def test_tf32_is_set_on_cuda_and_left_alone_where_it_was_found() -> None:
    tf32 = AmpConfig(precision="tf32", batch_size=4)
    found = AmpConfig(precision="tf32", batch_size=4, as_found=True)
    for target in ("torch", "accelerate"):
        text = export(Setting(tf32), target).text
        assert 'torch.set_float32_matmul_precision("high")\ntorch.backends.cudnn.allow_tf32 = True\n' in text
        text = export(Setting(found), target).text
        assert "allow_tf32" not in text
        assert "they stay as they are" in text
    assert "tf32=True" in export(Setting(tf32), "transformers").text
    assert "tf32=" not in export(Setting(found), "transformers").text
    assert "as_found=True" in export(Setting(found), "lightning").text
    assert "set_float32_matmul_precision" in " ".join(export(Setting(tf32), "deepspeed").notes)


def test_what_a_framework_has_no_place_for_is_said() -> None:
    scale = LossScale(hysteresis=2, min_scale=2.0)
    config = AmpConfig(
        precision="fp16",
        batch_size=8,
        loss_scale=scale,
        fallback=["bf16", FallbackPlan(precision="fp32", batch_size=4)],
        environment={"MALLOC_TRIM_THRESHOLD_": "2147483647"},
    )
    for target in ("torch", "accelerate"):
        text = export(Setting(config), target).text
        assert "\n#   export MALLOC_TRIM_THRESHOLD_=2147483647\n" in text
        unheld = "hysteresis=2; min_scale=2.0; max_scale=16777216.0; the fallback to bf16, fp32"
        assert f"has no place for {unheld}: autotune_amp." in comments(text)
    assert "Nothing falls back to bf16, fp32." in export(Setting(config), "deepspeed").notes


@pytest.mark.parametrize("init_scale", [2.0**20, 2.0**-10])
def test_loss_scales_are_written_exactly(init_scale: float) -> None:
    scale = LossScale(init_scale=init_scale)
    config = AmpConfig(precision="fp16", batch_size=4, loss_scale=scale)
    for target in ("torch", "accelerate", "lightning", "transformers"):
        (written,) = re.findall(r"init_scale=([-+.e\d]+)", export(Setting(config), target).text)
        assert float(written) == init_scale
    bounds = re.findall(r"(?:min|max)_scale=([-+.e\d]+)", comments(export(Setting(config), "torch").text))
    assert [float(bound) for bound in bounds] == [scale.floor, scale.max_scale]


def test_the_environment_reaches_a_shell() -> None:
    variables = {"OMP_NUM_THREADS": "3", "ODD_": "a 'quoted' $value"}
    text = export(Setting(AmpConfig(precision="fp32", batch_size=4, environment=variables)), "env").text
    program = f'{text}printf \'%s|%s\' "$OMP_NUM_THREADS" "$ODD_"'
    done = subprocess.run(["/bin/sh", "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.split("|") == list(variables.values())
    assert export(Setting(AmpConfig(precision="fp32", batch_size=4)), "env").text.startswith("# ")


def test_deepspeed_gets_json_and_notes() -> None:
    made = export(Setting(ACCUMULATED, loss="sum"), "deepspeed")
    document = json.loads(made.text)
    assert (document["train_micro_batch_size_per_gpu"], document["gradient_accumulation_steps"]) == (4, 2)
    assert any("multiply it by 2" in note for note in made.notes)


@pytest.mark.parametrize("config", [*CONFIGS, PINNED], ids=["fp32", "bf16", "fp16", "pinned"])
def test_every_text_says_where_it_comes_from(config: AmpConfig) -> None:
    setting = Setting(config, "cpu", origin="studies/train: measured")
    for target in TARGETS:
        made = export(setting, target)
        assert (made.notes[0] if target == "deepspeed" else made.text.splitlines()[0]) == (
            "studies/train: measured." if target == "deepspeed" else ORIGIN
        )
        assert is_exported(made.text)
        assert ("DataLoader(" in made.text) == ("collate_fn" in made.text)
    assert accelerate_file(setting).text.startswith(f"{ORIGIN}\n")
    assert is_exported(export(Setting(config, "cpu", origin="long/" * 40), "torch").text)


@pytest.mark.parametrize(
    "text",
    ["", "import torch\n", f"import torch\n{ORIGIN}\n", "[]", '{"train_micro_batch_size_per_gpu": 8, "optimizer": {}}'],
)
def test_other_files_are_no_exports(text: str) -> None:
    assert not is_exported(text)


def test_where_the_frameworks_module_holds_the_model_the_text_says_what_becomes_of_its_pins() -> None:
    for target, holder in (("lightning", "the LightningModule"), ("transformers", "`model`")):
        said = comments(export(Setting(PINNED, "cpu"), target).text)
        assert f"Where {holder} holds that model as an attribute" in said
        assert 'put it before them: "net.second".' in said
        assert "pinned_modules" not in comments(export(Setting(ACCUMULATED, "cpu"), target).text)
    for target in ("torch", "accelerate"):
        assert "pinned_modules" not in comments(export(Setting(PINNED, "cpu"), target).text)


def test_a_launch_file_says_what_the_script_has_to_do() -> None:
    environment = {"MALLOC_TRIM_THRESHOLD_": "2147483647"}
    pinned = accelerate_file(Setting(msgspec.structs.replace(PINNED, environment=environment), "cpu"))
    (needs,) = pinned.notes
    assert re.match(r"The script has to .*AutotuneAccelerator.*neither casts.*does not keep second in fp32", needs)
    assert needs.endswith("With a plain Accelerator this file trains in fp32.")
    assert comments(pinned.text).startswith(f"{needs} accelerate launch --config_file")
    assert "\n#   export MALLOC_TRIM_THRESHOLD_=2147483647\n" in pinned.text
    plain = accelerate_file(Setting(msgspec.structs.replace(PINNED, pinned_modules=())))
    assert plain.notes == ()
    assert 'mixed_precision: "fp16"\n' in plain.text
    assert re.search(r"no place for hysteresis=2; .*the fallback to fp32: .*AutotuneAccelerator", comments(plain.text))
    loop = accelerate_file(Setting(ACCUMULATED, is_loop=True))
    assert "train_step" in loop.notes[0]
    assert 'mixed_precision: "bf16"\n' in loop.text


def test_where_the_loss_is_in_another_precision_than_measured_the_text_says_so() -> None:
    for target, ours in (("accelerate", "AutotuneAccelerator"), ("transformers", "AutotuneTrainer")):
        said = comments(export(Setting(ACCUMULATED, "cpu"), target).text)
        assert re.search(rf"in fp32.*; measured was the loss .*\.{ours} trains so", said)
        assert "measured was" not in export(Setting(CONFIGS[0], "cpu"), target).text


def test_what_cannot_be_exported_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no export to 'keras'") as raised:
        export(Setting(ACCUMULATED), "keras")
    assert all(target in raised.value.next_step for target in TARGETS)
    fp8 = AmpConfig(precision="fp8", batch_size=4)
    for target in set(TARGETS) - {"env"}:
        with pytest.raises(InvalidRequestError, match="fp8"):
            export(Setting(fp8), target)
    with pytest.raises(InvalidRequestError, match="fp8"):
        accelerate_file(Setting(fp8))
    for target in ("lightning", "transformers", "deepspeed"):
        with pytest.raises(InvalidRequestError, match=f"no export to {target} of a training") as raised:
            export(Setting(ACCUMULATED, is_loop=True), target)
        assert "--to torch or --to accelerate" in raised.value.next_step


def test_rendering_imports_no_framework() -> None:
    program = (
        "import sys\n"
        "from autotune_amp.core.config import AmpConfig, LossScale\n"
        "from autotune_amp.integrations.export import TARGETS, accelerate_file, export\n"
        "from autotune_amp.integrations.export_script import Setting\n"
        "config = AmpConfig(precision='fp16', batch_size=4, loss_scale=LossScale())\n"
        "for target in TARGETS: assert export(Setting(config), target).text\n"
        "assert accelerate_file(Setting(config)).text\n"
        "print({'torch', 'accelerate', 'lightning', 'transformers', 'deepspeed'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")
