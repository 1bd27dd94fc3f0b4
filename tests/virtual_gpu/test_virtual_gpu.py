"""The virtual card itself: where it must behave as a real one for the other tests to mean anything.

Most of it holds on a real card too, and runs there.
"""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from virtual_gpu_plugin import VirtualMachine

from autotune_amp.hardware import nvml

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def _two_cards() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")


@pytest.fixture(autouse=True)
def _memory_of_this_test() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def run(script: str, environment: dict[str, str] | None = None) -> str:
    """What a Python process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **(environment or {})}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.usefixtures("_two_cards")
def test_tensors_on_two_devices_are_refused() -> None:
    first, second = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
    for other in (second, torch.ones(2)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            first + other
    assert (first + torch.tensor(1.0)).device == first.device
    assert (first.to("cuda:1") + second).device == second.device


@pytest.mark.usefixtures("_two_cards")
def test_the_current_device_is_where_new_tensors_go() -> None:
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device == torch.device("cuda:1")
        assert torch.accelerator.current_device_index() == 1
    assert torch.ones(1, device="cuda").device == torch.device("cuda:0")


def test_memory_is_counted_in_blocks_and_segments() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    held = torch.empty(30 * MIB + 1, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == allocated + 30 * MIB + 512
    assert torch.cuda.memory_reserved() == reserved + 32 * MIB
    del held
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.max_memory_allocated() >= allocated + 30 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved


def test_a_batch_over_the_card_is_out_of_memory_and_the_next_is_not() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(total + MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries + 1
    assert torch.ones(1, device="cuda").item() == 1


def test_a_limit_for_the_process_is_out_of_memory() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(total // 2, dtype=torch.uint8, device="cuda")


def test_other_processes_memory_is_missing_here_and_named_by_nvml() -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    script = "import torch; torch.empty(1 << 30, dtype=torch.uint8, device='cuda'); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        less, _ = torch.cuda.mem_get_info()
        assert free - less >= 1 << 30
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        assert holder.pid in [pid for pid, _ in nvml.processes(uuid) or ()]
        holder.communicate("\n")
    assert torch.cuda.mem_get_info()[0] > less


FORK = """
import os, torch
{before}
pid = os.fork()
if pid == 0:
    try:
        torch.ones(1, device="cuda")
        print("works", flush=True)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.parametrize(
    ("before", "is_refused"),
    [
        ("os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'; torch.cuda.is_available()", False),
        ("torch.cuda.is_available()", True),
    ],
)
def test_a_fork_is_poisoned_by_what_initialises_cuda(before: str, is_refused: bool) -> None:
    printed = run(FORK.format(before=before), {"PYTORCH_NVML_BASED_CUDA_CHECK": "0"})
    assert ("Cannot re-initialize CUDA in forked subprocess" in printed) is is_refused, printed


def test_operations_that_wait_are_refused_on_demand() -> None:
    held = torch.arange(4.0, device="cuda")
    on_host = torch.arange(4.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        held.add_(1).to("cuda", torch.float16)
        torch.ones(2).pin_memory().to("cuda", non_blocking=True)
        for waits in (held[0].item, held.cpu, held.nonzero, lambda: held[held > 2], lambda: on_host.to("cuda")):
            with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
                waits()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_two_cards")
def test_each_card_draws_for_itself() -> None:
    def draw(device: str) -> torch.Tensor:
        return nn.functional.dropout(torch.ones(64, device=device)).cpu()

    torch.manual_seed(0)
    on_host, first, other = torch.rand(4), draw("cuda:0"), draw("cuda:1")
    torch.manual_seed(0)
    assert torch.equal(other, draw("cuda:1"))
    assert torch.equal(first, draw("cuda:0"))
    assert torch.equal(on_host, torch.rand(4))
    state = torch.cuda.get_rng_state("cuda:0")
    following = draw("cuda:0")
    torch.cuda.manual_seed(1)
    assert not torch.equal(following, draw("cuda:0"))
    torch.cuda.set_rng_state(state, "cuda:0")
    assert torch.equal(following, draw("cuda:0"))
    generator = torch.Generator("cuda:0").manual_seed(2)
    drawn = torch.rand(4, device="cuda:0", generator=generator)
    assert torch.equal(drawn, torch.rand(4, device="cuda:0", generator=generator.manual_seed(2)))


@pytest.mark.usefixtures("_two_cards")
def test_copies_and_checkpoints_stay_on_their_card() -> None:
    module = nn.Linear(3, 3, device="cuda:1")
    assert copy.deepcopy(module).weight.device == torch.device("cuda:1")
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    for location, device in ((None, "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")):
        file.seek(0)
        loaded = torch.load(file, map_location=location)["weight"]
        assert loaded.device == torch.device(device)
        assert torch.equal(loaded.cpu(), module.weight.detach().cpu())


ASSERT = """
import torch
try:
    torch.nn.functional.cross_entropy(torch.randn(2, 3, device="cuda"), torch.tensor([0, 7], device="cuda")).item()
except RuntimeError as error:
    print(str(error).splitlines()[0])
try:
    torch.ones(1, device="cuda")
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


def test_a_device_side_assert_is_the_end_of_its_process_on_the_card() -> None:
    assert run(ASSERT).splitlines() == ["CUDA error: device-side assert triggered"] * 2
    assert torch.ones(1, device="cuda").item() == 1


SEEN = """
import torch
print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid, torch.cuda.get_device_capability(0)[0])
"""


@pytest.mark.parametrize(
    ("visible", "num_seen", "first"),
    [("2,0", 2, 2), ("1,9,0", 1, 1), ("MIG-1", 1, 0)],
)
def test_visible_devices_are_chosen_and_ordered(
    visible: str, num_seen: int, first: int, virtual_machine: VirtualMachine
) -> None:
    environment = virtual_machine(num=3, cc="9.0,8.0,7.5")
    seen = run(SEEN, {**environment, "CUDA_VISIBLE_DEVICES": visible})
    assert seen == f"{num_seen} 000000a{first}-1111-2222-3333-444444444444 {(9, 8, 7)[first]}"


def test_a_sitecustomize_of_the_users_own_still_runs(tmp_path: Path, virtual_machine: VirtualMachine) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)])
    assert run("pass", {**virtual_machine(), "PYTHONPATH": path}) == "mine"
