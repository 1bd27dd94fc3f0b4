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


PRODUCT, CONVOLUTION = FULL_WAVE_FLOPS / FP32, 2 * (3 * 48 * 48) * 64 * (64 * 9) / FP32
COPIED = 4 * 1024**2 / HOST_LINK
# 9 tiles in 7 slices, of 6,912 positions at most 1,024 deep, are one wave.
TO_WEIGHT = 2 * 64 * 64 * (3 * 48 * 48 / 7) / (FP32 / 108)
EXPECTED = {  # microseconds until the host has issued it, and until the card has done it
    # A launch, and the longer of arithmetic and traffic.
    "add": (LAUNCH, LAUNCH + 3 * 4 * 1024**2 / MEMORY),
    "in place": (LAUNCH, LAUNCH + 2 * 4 * 1024**2 / MEMORY),
    "together": (LAUNCH, LAUNCH + 2 * 2 * 4 * 1024**2 / MEMORY),
    "product": (LAUNCH, LAUNCH + PRODUCT),
    "tf32": (LAUNCH, LAUNCH + FULL_WAVE_FLOPS / TF32),
    "bf16": (LAUNCH, LAUNCH + FULL_WAVE_FLOPS / HALF),
    "fp16": (LAUNCH, LAUNCH + FULL_WAVE_FLOPS / HALF),
    "batch": (LAUNCH, LAUNCH + 2 * PRODUCT),
    "a row more": (LAUNCH, LAUNCH + 2 * PRODUCT),  # for which one multiprocessor works and the others wait
    "convolution": (LAUNCH, LAUNCH + CONVOLUTION),
    "convolution in tf32": (LAUNCH, LAUNCH + CONVOLUTION * FP32 / TF32),
    "its backward": (LAUNCH, LAUNCH + CONVOLUTION + TO_WEIGHT),
    "view": (0.0, 0.0),
    # Two indices come from the host, which waits for them; the rows that are gathered are what is read.
    "rows": (None, 2 * LAUNCH + 2 * 8 / HOST_LINK + (2 * 2 * 1024 * 4 + 2 * 8) / MEMORY),
    # The host runs ahead until it waits.
    "ten products": (10 * LAUNCH, LAUNCH + 10 * PRODUCT),
    "product and item": (LAUNCH + PRODUCT, LAUNCH + PRODUCT),
    "to host": (LAUNCH + COPIED, LAUNCH + COPIED),
    "to card": (LAUNCH + COPIED, LAUNCH + COPIED),
    "to card without waiting": (LAUNCH, LAUNCH + COPIED),
}


def test_operators_take_what_is_reckoned_by_hand(operators: dict[str, Any]) -> None:
    for operator, (issued, done) in EXPECTED.items():
        found = operators[operator]
        assert found == [pytest.approx(found[0] if issued is None else issued), pytest.approx(done)], operator


def test_events_follow_the_card(operators: dict[str, Any]) -> None:
    assert not operators["is there at once"]
    assert operators["between events"] == pytest.approx(LAUNCH + PRODUCT)
