"""Which card is meant, what it can do and what is wrong with it: two cards, others' cards, drivers that do not work."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from conftest import CommandLine
from torch import Tensor, nn
from virtual_gpu_plugin import VirtualMachine

from autotune_amp import Workload
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.processes.process import Watcher
from autotune_amp.trial import worker
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Describe, Trial

pytestmark = pytest.mark.gpu
two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")

TRAIN = """
import torch
from torch import nn
from autotune_amp import Workload

def workload():
    {before}
    loss = lambda model, batch: (model(batch) + offset).square().mean()
    return Workload(lambda: nn.Linear(4, 1), loss, lambda size: torch.ones(size, 4))
"""


@pytest.fixture(autouse=True)
def _first_is_current() -> Iterator[None]:
    yield
    torch.cuda.set_device(0)


def spec(device: str) -> Trial:
    candidate = Setting(precision="fp32", batch_size=8)
    return Trial(candidate=candidate, device=device, torch_state=torch_state.capture(), num_steps=(1, 1))


def says_device(model: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = (model(batch) + torch.zeros(1, device="cuda")).square().mean()
    return result


def moves(model: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = model(batch.cuda()).square().mean()
    return result


@pytest.mark.parametrize(
    ("model", "has_tf32", "is_strict"),
    [
        (lambda: nn.Linear(8, 8), True, True),
        (lambda: nn.Conv2d(3, 3, 3), True, False),
        (lambda: nn.Conv2d(3, 3, 3), False, True),
    ],
)
def test_default_flags_are_strict_fp32_where_nothing_runs_in_tf32(
    model: Callable[[], nn.Module], has_tf32: bool, is_strict: bool
) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).square().mean()
        return found

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for is_kept in (True, False):
        context = Context(Workload(model, loss, lambda size: torch.randn(size, 3, 8, 8)), is_kept=is_kept)
        job = Describe(device="cuda:0", torch_state=torch_state.capture(), baseline_batch_size=4, has_tf32=has_tf32)
        described = worker.describe(context, job, lambda _: None)
        assert (described.as_found_precision, described.is_as_found_strict) == ("fp32", is_strict)


@two_cards
@pytest.mark.parametrize("loss", [says_device, moves])
def test_code_that_says_cuda_means_the_card_of_the_trial(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    for device in ("cuda:1", "cuda:0"):
        workload = Workload(lambda: nn.Linear(4, 1), loss, lambda size: torch.ones(size, 4))
        found = worker.run(Context(workload, is_kept=False), spec(device), lambda _: None)
        assert isinstance(found, Measurement), found


@two_cards
@pytest.mark.parametrize(
    "before",
    [
        'offset = torch.zeros(1, device="cuda")',
        "torch._C._cuda_getDeviceCount(); offset = 0",  # what is_available() does where NVML cannot count, as with MIG
    ],
)
def test_trials_share_one_process_where_loading_has_used_cuda(before: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(before=before))
    with LocalBackend(Payload(target="train:workload", path=(str(tmp_path), *sys.path)), "forked", Watcher()) as runner:
        runner.load(60)
        _, reason_not_to_fork, _ = runner.open("cuda:1", None, 60)
        assert reason_not_to_fork is not None
        assert ("zeros" in before) == (f"{tmp_path}/train.py:7" in reason_not_to_fork), reason_not_to_fork
        runner.keep()
        found = runner.submit(spec("cuda:1")).result()
        assert isinstance(found, Measurement), found


@pytest.mark.parametrize(("taken_mib", "kind"), [(240, "oom"), (8, "workload_error")])
def test_a_library_that_cannot_start_is_out_of_memory_only_near_the_trials_limit(taken_mib: int, kind: str) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        held = torch.empty(taken_mib << 20, dtype=torch.uint8, device=batch.device)
        raise RuntimeError(f"CUDA error: CUBLAS_STATUS_NOT_INITIALIZED beside {len(held)} bytes")

    gc.collect()
    torch.cuda.empty_cache()  # of what tests before have used
    context = Context(Workload(lambda: nn.Linear(4, 1), loss, lambda size: torch.ones(size, 4)), is_kept=True)
    limited = msgspec.structs.replace(spec("cuda:0"), memory_limit_bytes=256 << 20)
    found = worker.run(context, limited, lambda _: None)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert isinstance(found, Failure)
    assert found.kind == kind


def test_a_card_that_is_taken_does_not_speak_against_forking_for_another(virtual_machine: VirtualMachine) -> None:
    code = """
import subprocess, sys
from autotune_amp.processes.server import reason_not_to_fork

hold = "import torch; held = torch.ones(1, device='cuda:0'); print(flush=True); input()"
holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
holder.stdout.readline()
print([reason_not_to_fork(device, 1, "loading") is None for device in ("cuda:0", "cuda:1")])
holder.communicate(b"\\n")
"""
    assert run(code, virtual_machine(num=2, exclusive=1)) == "[False, True]"


def test_bf16_is_withdrawn_where_the_controllers_own_card_only_emulates_it(virtual_machine: VirtualMachine) -> None:
    code = """
from autotune_amp import AmpConfig, LossScale, PrecisionController

config = AmpConfig(precision="fp16", batch_size=8, loss_scale=LossScale(), fallback=("bf16", "fp32"))
print([list(PrecisionController(config, f"cuda:{card}")._policy.withdrawn) for card in range(2)])
"""
    assert run(code, virtual_machine(num=2, cc="7.5,8.0")) == "[['bf16'], []]"


MEASURE_ALL = """
import json, torch
from autotune_amp.hardware import measuring
from autotune_amp.hardware.measuring import measure
measuring.flops_per_second = lambda *arguments, **options: 1e12
found = [measure(f"cuda:{index}") for index in range(torch.cuda.device_count())]
print(json.dumps([[h.compute_capability, [p for p, c in h.precisions.items() if c.level == "native"]] for h in found]))
"""


def test_each_card_can_do_what_its_compute_capability_says(virtual_machine: VirtualMachine) -> None:
    ampere = ["fp32", "tf32", "bf16", "fp16"]
    assert json.loads(run(MEASURE_ALL, virtual_machine(num=7, cc="6.1,7.5,8.0,8.6,8.9,9.0,12.0"))) == [
        ["6.1", ["fp32", "fp16"]],
        ["7.5", ["fp32", "fp16"]],
        ["8.0", ampere],
        ["8.6", ampere],
        *([capability, [*ampere, "fp8"]] for capability in ("8.9", "9.0", "12.0")),
    ]
    environment = virtual_machine(num=3, cc="8.0,7.5,9.0")
    found = json.loads(run(MEASURE_ALL, {**environment, "CUDA_VISIBLE_DEVICES": "GPU-000000a2,GPU-000000a0"}))
    assert [capability for capability, _ in found] == ["9.0", "8.0"]


def test_no_visible_device_is_said_with_the_variable(cli: CommandLine, virtual_machine: VirtualMachine) -> None:
    cli.environment |= {**virtual_machine(num=2), "CUDA_VISIBLE_DEVICES": "7"}
    done = cli("probe", "--device", "cuda")
    assert done.code == 2
    assert "CUDA_VISIBLE_DEVICES is '7'" in done.err


def test_a_driver_that_is_too_old_is_told_of_with_the_way_on(cli: CommandLine, virtual_machine: VirtualMachine) -> None:
    target = cli.write("train.py", TRAIN.format(before="offset = 0"))
    cli.environment.update(virtual_machine(broken=1))
    done = cli("search", target)
    assert done.code == 2
    assert "too old" in done.err
    assert "--device cpu" in done.err


def run(code: str, machine: dict[str, str]) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env={**os.environ, **machine}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
