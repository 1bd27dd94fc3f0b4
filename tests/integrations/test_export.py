"""Exported texts: what they say, and each of them run."""

from __future__ import annotations

import ast
import builtins
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
from accelerate_training import fresh_accelerate
from framework_samples import ambient
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations.documents import deepspeed_config
from autotune_amp.integrations.export import (
    TARGETS,
    ExportSource,
    accelerate_file,
    export,
    is_exported,
)

ORIGIN = "# autotune-amp export of studies/train: measured"
ACCUMULATED = AmpConfig(precision="bf16", batch_size=4, accumulation_steps=2)
CONFIGS = [
    AmpConfig(precision="fp32", batch_size=8),
    ACCUMULATED,
    AmpConfig(
        precision="fp16",
        batch_size=4,
        accumulation_steps=2,
        loss_scale=LossScale(init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2),
        num_workers=1,
    ),
]
PINNED = AmpConfig(
    precision="fp16",
    batch_size=4,
    accumulation_steps=2,
    loss_scale=LossScale(init_scale=64.0, hysteresis=2),
    pinned_modules=("second",),
    fallback=(FallbackPlan(precision="fp32", batch_size=4, accumulation_steps=2, slowdown=1.5),),
)


def scaler_values(scaler: Any) -> tuple[float, ...]:
    """What a live scaler scales by, and how it goes on."""
    return (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())


def values_after(scale: LossScale | None, num_steps: int) -> tuple[float, ...]:
    """The same as the config has it, after steps without an overflow."""
    assert scale is not None
    grown = scale.growth_factor ** (num_steps // scale.growth_interval)
    return (scale.init_scale * grown, scale.growth_factor, scale.backoff_factor, scale.growth_interval)


def precision_here() -> str:
    """What autocast means around the caller."""
    return {torch.float16: "fp16", torch.bfloat16: "bf16", None: "fp32"}[ambient()]


class Net(nn.Module):
    """Notes what its forward runs in. Takes and returns what a Transformers Trainer wants, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.precisions: list[str] = []
        self.batch_sizes: list[int] = []
        self.second_dtypes: set[torch.dtype] = set()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        self.precisions.append(precision_here())
        self.batch_sizes.append(len(inputs))
        outputs = self.second(self.first(inputs))
        self.second_dtypes.add(outputs.dtype)
        return outputs if labels is None else {"loss": outputs.float().pow(2).mean(), "logits": outputs}


class Ran:
    """What a text left behind."""

    def __init__(self) -> None:
        self.net = Net()
        self.num_steps = 0
        self.loss_precisions: set[str] = set()
        self.names: dict[str, Any] = {}

    def count(self, *_: object) -> None:
        self.num_steps += 1


def exec_text(text: str, **names: Any) -> Ran:
    """Run the text in a script that has `dataset`, `model`, `optimizer` and `compute_loss`."""
    ran = Ran()
    optimizer = torch.optim.SGD(ran.net.parameters(), lr=0.01)
    optimizer.register_step_post_hook(ran.count)

    def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
        outputs = model(batch)
        ran.loss_precisions.add(precision_here())
        loss: Tensor = outputs.float().pow(2).mean()
        return loss

    given = {"dataset": torch.randn(32, 8), "model": ran.net, "optimizer": optimizer, "compute_loss": compute_loss}
    ran.names = given | names
    exec(compile(text, "exported.py", "exec"), ran.names)
    return ran


class Stream(IterableDataset[Tensor]):
    """Seven batches, which nobody can count beforehand."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(7 * ACCUMULATED.batch_size, 8))


def comments(text: str) -> str:
    return " ".join(" ".join(line[2:] for line in text.splitlines() if line.startswith("# ")).split())


def test_the_torch_text_leaves_no_gradients_behind_at_the_end_of_a_loader_of_unknown_length() -> None:
    ran = exec_text(export(ExportSource(ACCUMULATED, "cpu"), "torch").text, dataset=Stream())
    assert ran.net.batch_sizes == [ACCUMULATED.batch_size] * 7
    assert ran.num_steps == 4
    assert [parameter.grad for parameter in ran.net.parameters()] == [None] * 4


@pytest.mark.parametrize("target", ["torch", "accelerate"])
def test_the_text_sets_up_what_was_recommended_of_model_and_optimizer(target: str) -> None:
    further: dict[str, Any] = {"weights": "bf16", "optimizer_impl": "fused"}
    config = AmpConfig(precision="bf16", batch_size=8, **further)
    with fresh_accelerate():
        text = export(ExportSource(config, "cpu"), target).text
        ran = exec_text(text)
    assert ran.net.first.weight.dtype == torch.bfloat16
    assert ran.num_steps == 4
    if target == "accelerate":
        optimizer = ran.names["optimizer"].optimizer
        assert all(group["fused"] for group in optimizer.param_groups)
    else:
        assert "fused=True" in comments(text), "where the optimizer is made"
        compiled = export(ExportSource(AmpConfig(precision="bf16", batch_size=8, compile="default")), "torch").text
        assert 'model.compile(mode="default")' in compiled


def test_the_torch_text_of_a_loop_of_its_own() -> None:
    seen = []

    def train_step(state: Any, batch: Any, amp: Any) -> None:
        seen.append((state, len(batch), amp.config))

    text = export(ExportSource(ACCUMULATED, "cpu", is_loop=True), "torch").text
    exec_text(text, train_step=train_step, state="mine")
    assert seen[0] == ("mine", ACCUMULATED.batch_size, ACCUMULATED)


@pytest.mark.parametrize("target", ["torch", "accelerate"])
def test_a_loop_of_its_own_in_fp8_has_its_model_attached(target: str) -> None:
    pytest.importorskip("torchao")
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    seen = []

    def train_step(state: Any, batch: Any, amp: Any) -> None:
        seen.append((amp.config.precision, [type(layer).__name__ for layer in model]))

    config = AmpConfig(precision="fp8", batch_size=4, fallback=["bf16"])
    text = export(ExportSource(config, "cpu", is_loop=True), target).text
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fresh_accelerate():
        exec_text(text, train_step=train_step, state="mine", model=model, optimizer=optimizer, dataset=[1, 2, 3])
    assert seen == [("fp8", ["Linear", "Fp8Linear", "Linear"])]


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
    text = export(ExportSource(config, "cpu", loss=loss, share="(labels != -100)"), target).text
    with fresh_accelerate():
        exec_text(
            text,
            dataset=dataset,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            compute_loss=compute_loss,
            count=lambda batch: (batch[1] != -100).sum(),
        )
    assert ("Define count(batch) for a batch: labels != -100." in comments(text)) == (loss == "weighted")
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
    pin_memory="on",
    prefetch_factor="4",
    environment={"MALLOC_TRIM_THRESHOLD_": "2147483647"},
    as_found=True,
    allocator="expandable_segments",
    memory_format="channels_last",
    cudnn_benchmark="on",
    attention="cudnn",
    activation_checkpointing="blocks",
    optimizer_impl="foreach",
    compile="reduce-overhead",
    arguments=(("!ckpt", "on"), ("attn", "eager")),
)
WORDS = {
    "precision": "fp16|float16",
    "batch_size": r"\b7\b",
    "accumulation_steps": r"\b3\b",
    "loss_scale": "4096|initial_scale_power.: 12",
    "fallback": "falls? ?back.*bf16.*fp32",
    "pinned_modules": "head",
    "num_workers": "num_workers=5",
    "pin_memory": "pin_memory=(True|.on)",
    "prefetch_factor": "prefetch_factor=.?4",
    "environment": "MALLOC_TRIM_THRESHOLD_",
    "as_found": "as_found=True|they are kept",
    "allocator": "expandable_segments",
    "weights": "weights=.bf16",
    "memory_format": "channels_last",
    "cudnn_benchmark": "cudnn.?benchmark",
    "attention": "attention=.cudnn|CUDNN_ATTENTION",
    "activation_checkpointing": "blocks",
    "fp8_recipe": "tensorwise",
    "optimizer_impl": "foreach",
    "compile": "reduce-overhead",
    "arguments": "of the command: ckpt=on attn=eager",
}
TEXTS = [*TARGETS, "accelerate file"]


def everything(config: AmpConfig, target: str) -> str:
    """The text and the notes on one line."""
    setting = ExportSource(config, "cuda")
    made = accelerate_file(setting) if target == "accelerate file" else export(setting, target)
    return " ".join(re.sub(r"\s#? *", " ", " ".join([made.text, *made.notes])).split())


@pytest.mark.parametrize("target", TEXTS)
@pytest.mark.parametrize("config", [FULL, msgspec.structs.replace(FULL, pinned_modules=())], ids=["pinned", "plain"])
def test_every_field_of_a_config_shows_in_every_text_or_its_comments(config: AmpConfig, target: str) -> None:
    assert WORDS.keys() == set(AmpConfig.__struct_fields__), "a new field is to be found here, too"
    text = everything(config, target)
    if not config.pinned_modules:  # what goes with other precisions than fp16, which alone has a loss scale
        config = msgspec.structs.replace(config, precision="bf16", loss_scale=None, fallback=[], weights="bf16")
        text += everything(config, target)
        config = msgspec.structs.replace(config, precision="fp8", weights="as_found", fp8_recipe="tensorwise")
        text += everything(config, target)
    left_out = {"weights", "fp8_recipe"} if config.pinned_modules else {"pinned_modules"}
    wanted = [name for name in WORDS if name not in left_out]
    assert [name for name in wanted if not re.search(WORDS[name], text)] == []


@pytest.mark.parametrize("target", ["torch", "lightning", "accelerate", "transformers"])
@pytest.mark.parametrize("config", [FULL, msgspec.structs.replace(FULL, pinned_modules=())], ids=["pinned", "plain"])
def test_every_name_in_a_text_is_defined(config: AmpConfig, target: str) -> None:
    nodes = list(ast.walk(ast.parse(export(ExportSource(config), target).text)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    defined |= {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    given = {"dataset", "model", "optimizer", "compute_loss"}
    assert {node.id for node in names} - defined - given == set()


@pytest.mark.parametrize("target", ["lightning", "transformers", "deepspeed"])
def test_where_a_trainer_divides_the_loss_the_text_says_what_to_multiply_it_by(target: str) -> None:
    said = {}
    for loss in ("mean", "sum", "weighted"):
        made = export(ExportSource(ACCUMULATED, loss=loss, share="tokens"), target)
        said[loss] = " ".join([comments(made.text), *made.notes])
    assert "multiply" not in said["mean"]
    assert "multiply it by 2." in said["sum"]
    assert re.search("multiply it by 2 and by .* share of all tokens", said["weighted"])


def test_tf32_is_asked_for_and_the_flags_that_were_found_are_left_alone() -> None:
    tf32 = AmpConfig(precision="tf32", batch_size=4)
    as_found = msgspec.structs.replace(tf32, as_found=True)
    for target, flag in (("torch", "allow_tf32"), ("transformers", "tf32=")):
        assert f"{flag}{' = ' if target == 'torch' else ''}True" in everything(tf32, target)
        assert flag not in everything(as_found, target)


@pytest.mark.parametrize("target", TEXTS)
def test_no_text_lacks_the_flags_that_were_found(target: str) -> None:
    text = everything(AmpConfig(precision="bf16", batch_size=4, as_found=True), target)
    assert "they are kept" in text
    assert not re.search(r"cannot express [^:]*as_found", text)


@pytest.mark.parametrize("target", TEXTS)
def test_of_fp8_every_text_says_who_makes_its_layers_and_what_is_around_them(target: str) -> None:
    text = everything(AmpConfig(precision="fp8", batch_size=4, compile="default", fallback=["bf16", "fp32"]), target)
    assert re.search("precision=.fp8", text)
    assert "DeepSpeed's fp8" not in text
    around = {"deepspeed": '"bf16": {"enabled": true}', "accelerate file": 'mixed_precision: "bf16"'}
    around |= {"torch": "torch.bfloat16", "transformers": "bf16=True"}
    assert around.get(target, "") in " ".join(text.split()).replace('{ "enabled": true }', '{"enabled": true}')
    assert ("prepare(" in text) is (target in ("torch", "accelerate")), "the adapters set it up themselves"


def test_the_environment_reaches_a_shell() -> None:
    variables = {"MALLOC_TRIM_THRESHOLD_": "3", "PYTORCH_ALLOC_CONF": "a 'quoted' $value"}
    text = export(ExportSource(AmpConfig(precision="fp32", batch_size=4, environment=variables)), "env").text
    program = f'{text}printf \'%s|%s\' "$MALLOC_TRIM_THRESHOLD_" "$PYTORCH_ALLOC_CONF"'
    done = subprocess.run(["/bin/sh", "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.split("|") == list(variables.values())
    assert export(ExportSource(AmpConfig(precision="fp32", batch_size=4)), "env").text.startswith("# ")


def test_every_text_says_where_it_comes_from_and_is_known_by_that() -> None:
    setting = ExportSource(PINNED, "cpu", origin="studies/train: measured")
    for target in TARGETS:
        made = export(setting, target)
        if target == "deepspeed":
            assert made.notes[0] == "studies/train: measured."
        else:
            assert made.text.startswith(f"{ORIGIN}\n")
        assert is_exported(made.text)
    assert accelerate_file(setting).text.startswith(f"{ORIGIN}\n")
    deepspeeds = '{"train_micro_batch_size_per_gpu": 8, "optimizer": {}}'
    for text in ("", f"import torch\n{ORIGIN}\n", "[]", deepspeeds):
        assert not is_exported(text)


@pytest.mark.parametrize(("device_type", "pins"), [("cuda", ("second",)), ("cpu", ())])
def test_a_launch_file_says_what_a_plain_accelerator_would_do_under_it(device_type: str, pins: tuple[str, ...]) -> None:
    """It keeps no module pinned, and on a CPU it neither casts to fp16 nor scales."""
    made = accelerate_file(ExportSource(msgspec.structs.replace(PINNED, pinned_modules=pins), device_type))
    (note,) = made.notes
    assert re.search(f"cannot train fp16 on {device_type}.*{' '.join(pins)}.*fp32", note)
    assert "AutotuneAccelerator" in comments(made.text)
    assert 'mixed_precision: "no"\n' in made.text
    plain = accelerate_file(ExportSource(msgspec.structs.replace(PINNED, pinned_modules=())))
    assert plain.notes == ()
    assert 'mixed_precision: "fp16"\n' in plain.text


def deepspeed_said(**options: Any) -> tuple[dict[str, Any], str]:
    config = AmpConfig(precision="fp16", batch_size=8, accumulation_steps=4, loss_scale=LossScale(**options))
    made = export(ExportSource(config, loss="sum"), "deepspeed")
    return json.loads(made.text), " ".join(made.notes)


def test_deepspeeds_json_and_what_it_rounds() -> None:
    options = {"init_scale": 3000.0, "growth_interval": 50, "hysteresis": 2, "min_scale": 2.0, "growth_factor": 4.0}
    document, said = deepspeed_said(**options)
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
    assert "LossScale(init_scale=3000.0" in said
    with pytest.raises(InvalidRequestError, match="least scale is 1"):
        deepspeed_said(init_scale=2.0**-10)
    assert deepspeed_config(ACCUMULATED)["bf16"] == {"enabled": True}
    beside = AmpConfig(precision="bf16", batch_size=8, num_workers=2, fallback=("fp32",))
    said = " ".join(export(ExportSource(beside), "deepspeed").notes)
    assert re.search("num_workers=2.*fallback to fp32.*another --to", said)


def test_what_cannot_be_exported_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no export to 'keras'") as raised:
        export(ExportSource(ACCUMULATED), "keras")
    assert all(target in raised.value.next_step for target in TARGETS)
    for target in ("lightning", "transformers", "deepspeed"):
        with pytest.raises(InvalidRequestError, match=f"cannot be exported to {target}") as raised:
            export(ExportSource(ACCUMULATED, is_loop=True), target)
        assert "--to torch or --to accelerate" in raised.value.next_step


def test_rendering_imports_no_framework() -> None:
    program = (
        "import sys\n"
        "from autotune_amp.core.config import AmpConfig, LossScale\n"
        "from autotune_amp.integrations.export import TARGETS, ExportSource, accelerate_file, export\n"
        "setting = ExportSource(AmpConfig(precision='fp16', batch_size=4, loss_scale=LossScale()))\n"
        "assert accelerate_file(setting).text and all(export(setting, target).text for target in TARGETS)\n"
        "print({'torch', 'accelerate', 'lightning', 'transformers', 'deepspeed'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # trainers write where they are
    with fresh_accelerate():
        yield


@pytest.mark.parametrize("target", ["accelerate", "torch"])
@pytest.mark.parametrize("config", [*CONFIGS, PINNED], ids=["fp32", "bf16", "fp16", "pinned"])
def test_a_text_trains_as_the_config_says(config: AmpConfig, target: str) -> None:
    ran = exec_text(export(ExportSource(config, "cpu"), target).text)
    assert ran.names["loader"].num_workers == (config.num_workers or 0)
    assert set(ran.net.batch_sizes) == {config.batch_size}
    assert {*ran.net.precisions, *ran.loss_precisions} == {config.precision}
    assert ran.num_steps == 32 // config.batch_size // config.accumulation_steps
    assert config.precision != "fp16" or ran.net.second_dtypes == {
        torch.float32 if config.pinned_modules else torch.float16
    }
    if config.loss_scale is not None:
        scaler = ran.names.get("scaler") or ran.names.get("controller") or ran.names["accelerator"].scaler
        assert scaler_values(scaler) == values_after(config.loss_scale, ran.num_steps)


@pytest.mark.parametrize("config", CONFIGS[:2], ids=["fp32", "bf16"])
def test_a_plain_accelerator_takes_the_launch_file(config: AmpConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator
    from accelerate.commands.config.config_args import load_config_from_file

    Path("accelerate.yaml").write_text(accelerate_file(ExportSource(config, "cpu")).text)
    loaded = load_config_from_file("accelerate.yaml")
    assert (loaded.distributed_type.value, loaded.num_processes) == ("NO", 1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", loaded.mixed_precision)  # as `accelerate launch` does
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(loaded.use_cpu))
    made = Accelerator()
    assert (made.mixed_precision, made.device.type) == ({"fp32": "no"}.get(config.precision, config.precision), "cpu")


def test_transformers() -> None:
    pytest.importorskip("transformers")
    samples = [{"inputs": sample, "labels": torch.zeros(1)} for sample in torch.ones(32, 8)]
    ran = exec_text(export(ExportSource(PINNED, "cpu"), "transformers").text, dataset=samples)
    trainer, args = ran.names["trainer"], ran.names["trainer"].args
    args.max_steps, args.save_strategy, args.disable_tqdm = 2, "no", True
    trainer.train()
    assert trainer.state.global_step == 2
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 2)
    assert (args.fp16, args.bf16, args.tf32, args.dataloader_num_workers) == (True, False, False, 0)
    assert ran.net.batch_sizes == [4] * 4
    assert (set(ran.net.precisions), ran.net.second_dtypes) == ({"fp16"}, {torch.float32})
    assert trainer.controller.config == PINNED
    assert trainer.controller.status().pinned_modules == PINNED.pinned_modules
    assert scaler_values(trainer.accelerator.scaler) == values_after(PINNED.loss_scale, 2)


@pytest.mark.filterwarnings("ignore:.*tensorboardX")  # Lightning's default logger, which is not installed
def test_lightning() -> None:
    ran = exec_text(export(ExportSource(PINNED, "cpu"), "lightning").text)
    trainer = ran.names["trainer"]
    assert trainer.precision_plugin.config == PINNED
    assert (trainer.accumulate_grad_batches, ran.names["loader"].batch_size) == (2, 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"environment": {"LD_PRELOAD": "theirs.so"}},
        {"environment": {"PYTORCH_ALLOC_CONF": "a\nimport os"}},
        {"environment": {"$(touch mine)": "a"}},
        {"environment": {"MALLOC_TRIM_THRESHOLD_": 1}},
        {"pinned_modules": ["a\nimport os"]},
        {"pinned_modules": ["\x1b[31m"]},
        {"pinned_modules": [3]},
    ],
)
def test_what_could_become_another_line_or_run_something_is_no_config(fields: Any) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        AmpConfig(precision="bf16", batch_size=4, **fields)


def test_a_name_beyond_ascii_is_itself_in_every_text() -> None:
    name = "blöck.\U0001f600"
    config = AmpConfig(precision="bf16", batch_size=4, pinned_modules=(name,))
    for target in ("torch", "lightning", "accelerate", "transformers"):
        parsed = ast.parse(export(ExportSource(config), target).text)
        assert name in [node.value for node in ast.walk(parsed) if isinstance(node, ast.Constant)]


def test_an_origin_with_line_breaks_stays_a_comment() -> None:
    setting = ExportSource(AmpConfig(precision="bf16", batch_size=4), origin="a\nimport os\x85\x1b[31m")
    for target in ("torch", "env", "transformers"):
        first, *_ = export(setting, target).text.splitlines()
        assert first == "# autotune-amp export of a import os [31m"
