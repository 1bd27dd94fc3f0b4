"""The clock of named cards: seconds of operators against what is reckoned by hand, and the shapes that come of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from virtual_gpu_plugin import VirtualMachine

pytestmark = pytest.mark.gpu

LAUNCH = 8.0  # microseconds, as all below
FP32, TF32, HALF = 19.5e6, 156e6, 312e6  # an A100's operations in a microsecond
MEMORY, HOST_LINK = 1.555e6, 32e3  # and bytes
FULL_WAVE = 768, 576, 1024  # a product that gives each of its 108 multiprocessors one tile of 64 x 64, 1024 deep
FULL_WAVE_FLOPS = 2 * 768 * 576 * 1024

OPERATORS = """
import json, time, torch
def lap(function, num=1):
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num):
        function()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    return [1e6 * (issued - began), 1e6 * (time.perf_counter() - began)]

found = {}
x = torch.zeros(1024, 1024, device="cuda")
found["add"] = lap(lambda: x + x)
found["in place"] = lap(lambda: x.add_(1))
found["view"] = lap(lambda: x.view(-1)[1:].t())
found["together"] = lap(lambda: torch._foreach_add_([x, x], 1))
found["rows"] = lap(lambda: x[torch.tensor([1, 2], device="cuda")])
m, n, k = 768, 576, 1024
a, b = torch.zeros(m, k, device="cuda"), torch.zeros(k, n, device="cuda")
found["product"] = lap(lambda: a @ b)
found["ten products"] = lap(lambda: a @ b, 10)
found["product and item"] = lap(lambda: (a @ b)[0, 0].item())
found["bf16"] = lap(lambda a=a.bfloat16(), b=b.bfloat16(): a @ b)
found["fp16"] = lap(lambda a=a.half(), b=b.half(): a @ b)
found["a row more"] = lap(lambda a=torch.zeros(m + 1, k, device="cuda"): a @ b)
found["batch"] = lap(lambda a=torch.zeros(2, m, k, device="cuda"), b=torch.zeros(2, k, n, device="cuda"): a @ b)
convolution = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda")
images = torch.zeros(3, 64, 48, 48, device="cuda", requires_grad=True)
found["convolution in tf32"] = lap(lambda: convolution(images))
torch.backends.cudnn.conv.fp32_precision = "ieee"
torch.backends.cuda.matmul.fp32_precision = "tf32"
found["convolution"] = lap(lambda: convolution(images))
output = convolution(images)
gradient = torch.zeros_like(output)
found["its backward"] = lap(lambda: torch.autograd.grad(output, [images, convolution.weight], gradient))
found["tf32"] = lap(lambda: a @ b)
torch.backends.cuda.matmul.fp32_precision = "ieee"
found["to host"] = lap(lambda: x.cpu())
pinned = torch.zeros(1024, 1024).pin_memory()
found["to card"] = lap(lambda: pinned.to("cuda"))
found["to card without waiting"] = lap(lambda: pinned.to("cuda", non_blocking=True))
first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
first.record()
a @ b
second.record()
found["is there at once"] = second.query()
while not second.query():
    pass
found["between events"] = 1e3 * first.elapsed_time(second)
print(json.dumps(found))
"""

# A training of layers that are 1024 wide and a thirty-second of that in truth.
STEPS = """
import json, sys, time, torch
from torch import nn

def step_seconds(dtype, batch_size):
    layers = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    samples = torch.randn(batch_size, 32, device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(samples).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    return time.perf_counter() - began

def largest_batch(dtype):
    batch_size = 256
    while True:
        try:
            step_seconds(dtype, 2 * batch_size)
        except torch.OutOfMemoryError:
            return batch_size
        torch.cuda.empty_cache()
        batch_size *= 2

dtypes = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
steps = {name: {size: step_seconds(dtype, size) for size in (2, 4, 4096)} for name, dtype in dtypes.items()}
largest = {name: largest_batch(dtypes[name]) for name in ("fp32", "fp16")}
print(json.dumps({"steps": steps, "largest": largest, "name": torch.cuda.get_device_name()}))
"""


def measured(script: str, environment: dict[str, str]) -> dict[str, Any]:
    """What a process on that machine finds."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def operators(virtual_machine: VirtualMachine) -> dict[str, Any]:
    return measured(OPERATORS, virtual_machine(card="A100"))


@pytest.fixture(scope="module")
def a100(virtual_machine: VirtualMachine) -> dict[str, Any]:
    return measured(STEPS, virtual_machine(card="A100", magnification=32))


@pytest.fixture(scope="module")
def t4(virtual_machine: VirtualMachine) -> dict[str, Any]:
    return measured(STEPS, virtual_machine(card="T4", magnification=32))


@pytest.mark.parametrize(
    ("operator", "device_microseconds"),
    [
        ("add", 3 * 4 * 1024**2 / MEMORY),
        ("in place", 2 * 4 * 1024**2 / MEMORY),
        ("together", 2 * 2 * 4 * 1024**2 / MEMORY),
        ("product", FULL_WAVE_FLOPS / FP32),
        ("tf32", FULL_WAVE_FLOPS / TF32),
        ("bf16", FULL_WAVE_FLOPS / HALF),
        ("fp16", FULL_WAVE_FLOPS / HALF),
        ("batch", 2 * FULL_WAVE_FLOPS / FP32),
        ("a row more", 2 * FULL_WAVE_FLOPS / FP32),  # for which one multiprocessor works and the others wait
        ("convolution", 2 * (3 * 48 * 48) * 64 * (64 * 9) / FP32),
        ("convolution in tf32", 2 * (3 * 48 * 48) * 64 * (64 * 9) / TF32),
    ],
)
def test_an_operator_takes_its_launch_and_the_longer_of_arithmetic_and_traffic(
    operators: dict[str, Any], operator: str, device_microseconds: float
) -> None:
    assert operators[operator] == [pytest.approx(LAUNCH), pytest.approx(LAUNCH + device_microseconds)]


def test_a_convolutions_backward_is_two_products(operators: dict[str, Any]) -> None:
    to_input = 2 * (3 * 48 * 48) * 64 * (64 * 9) / FP32
    depth = 3 * 48 * 48 / 7  # 6,912 positions in slices of at most 1,024
    to_weight = 2 * 64 * 64 * depth / (FP32 / 108)  # 9 tiles in 7 slices: one wave
    assert operators["its backward"][1] == pytest.approx(LAUNCH + to_input + to_weight)


def test_a_view_takes_nothing(operators: dict[str, Any]) -> None:
    assert operators["view"] == [0, 0]


def test_rows_that_are_gathered_are_what_is_read(operators: dict[str, Any]) -> None:
    num_indices, num_launches = 2, 2  # the indices come from the host
    traffic = (2 * num_indices * 1024 * 4 + num_indices * 8) / MEMORY
    copied = num_indices * 8 / HOST_LINK
    assert operators["rows"][1] == pytest.approx(num_launches * LAUNCH + copied + traffic)


def test_the_host_runs_ahead_until_it_waits(operators: dict[str, Any]) -> None:
    product = FULL_WAVE_FLOPS / FP32
    assert operators["ten products"] == [pytest.approx(10 * LAUNCH), pytest.approx(LAUNCH + 10 * product)]
    assert operators["product and item"] == [pytest.approx(LAUNCH + product)] * 2


def test_copies_cross_the_link_and_wait_unless_told_not_to(operators: dict[str, Any]) -> None:
    copied = 4 * 1024**2 / HOST_LINK
    assert operators["to host"] == operators["to card"] == [pytest.approx(LAUNCH + copied)] * 2
    assert operators["to card without waiting"] == [pytest.approx(LAUNCH), pytest.approx(LAUNCH + copied)]


def test_events_follow_the_card(operators: dict[str, Any]) -> None:
    assert not operators["is there at once"]
    assert operators["between events"] == pytest.approx(LAUNCH + FULL_WAVE_FLOPS / FP32)


def test_small_batches_are_bound_by_launches(a100: dict[str, Any]) -> None:
    steps = a100["steps"]
    assert steps["bf16"]["4"] < 1.05 * steps["bf16"]["2"]
    assert steps["bf16"]["2"] > steps["fp32"]["2"]  # casts are launches too


def test_large_batches_are_many_times_faster_in_bf16(a100: dict[str, Any]) -> None:
    assert a100["steps"]["bf16"]["4096"] < a100["steps"]["fp32"]["4096"] / 5


def test_a_t4_has_fp16_and_only_emulates_bf16(t4: dict[str, Any]) -> None:
    steps = t4["steps"]
    assert t4["name"] == "Tesla T4"
    assert steps["fp16"]["4096"] < steps["bf16"]["4096"] / 3
    assert steps["bf16"]["4096"] == pytest.approx(steps["fp32"]["4096"], rel=0.2)


def test_memory_is_a_wall_which_is_lower_in_fp32_and_on_a_smaller_card(
    a100: dict[str, Any], t4: dict[str, Any]
) -> None:
    assert t4["largest"]["fp32"] < a100["largest"]["fp32"]
    assert all(card["largest"]["fp32"] <= card["largest"]["fp16"] for card in (a100, t4))
