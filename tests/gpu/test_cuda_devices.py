"""Two cards, a caller that has used one, drivers that do not work: what is run is run where it was asked to be."""

from __future__ import annotations

import gc
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
from autotune_amp.hardware import identify, nvml, probe
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.isolation.local import LocalBackend, Payload
from autotune_amp.isolation.process import Watcher
from autotune_amp.precision import torch_state
from autotune_amp.runtime.scaler import LaggedReader
from autotune_amp.trial import worker
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Trial

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
        _, why_not_fork = runner.open("cuda:1", None, 60)
        assert why_not_fork is not None
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
from autotune_amp.isolation.forking import why_not_fork

hold = "import torch; held = torch.ones(1, device='cuda:0'); print(flush=True); input()"
holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
holder.stdout.readline()
print([why_not_fork(device, 1, "loading") is None for device in ("cuda:0", "cuda:1")])
holder.communicate(b"\\n")
"""
    assert run(code, virtual_machine(num=2, exclusive=1)) == "[False, True]"


@two_cards
def test_a_number_is_waited_for_on_the_card_that_it_comes_from() -> None:
    reader = LaggedReader()
    reader.push([torch.ones((), device="cuda:1")], (7,))
    ((_, event, _),) = reader._waiting
    assert event is not None
    assert event.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert reader.pop() == ([1.0], (7,))


def test_bf16_is_withdrawn_where_the_controllers_own_card_only_emulates_it(virtual_machine: VirtualMachine) -> None:
    code = """
from autotune_amp import AmpConfig, LossScale, PrecisionController

config = AmpConfig(precision="fp16", batch_size=8, loss_scale=LossScale(), fallback=("bf16", "fp32"))
print([list(PrecisionController(config, f"cuda:{card}")._policy.withdrawn) for card in range(2)])
"""
    assert run(code, virtual_machine(num=2, cc="7.5,8.0")) == "[['bf16'], []]"


def test_a_caller_that_has_used_the_card_is_no_stranger_there() -> None:
    held = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    uuid = identify("cuda:0").uuid
    if uuid is None or os.getpid() not in dict(nvml.processes(uuid) or ()):
        pytest.skip("needs the card's processes by the numbers that they have here, which a container hides")
    hardware = probe("cuda:0")
    assert not any(str(os.getpid()) in note for note in hardware.notes)
    assert hardware.memory.held_by_caller >= held.numel()
    others = LoadMeter(uuid).stop().card_processes
    assert os.getpid() not in [other.pid for other in others or ()]


def test_a_driver_that_is_too_old_is_told_of_with_the_way_on(cli: CommandLine, virtual_machine: VirtualMachine) -> None:
    target = cli.write("train.py", TRAIN.format(before="offset = 0"))
    cli.environment.update(virtual_machine(broken=1))
    for command in (("probe",), ("search", target)):
        done = cli(*command)
        assert done.code == 2
        assert "driver on your system is too old" in done.err
        assert "--device cpu" in done.err


def run(code: str, machine: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **machine}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
