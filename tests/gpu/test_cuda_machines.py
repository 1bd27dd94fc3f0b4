"""Machines with other cards: which device is meant, what it can do, and what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from conftest import CommandLine
from virtual_gpu_plugin import VirtualMachine

pytestmark = pytest.mark.gpu
MEASURE_ALL = """
import json, torch
from autotune_amp.hardware import cuda, matmul, measure
matmul.flops_per_second = lambda *arguments, **options: 1e12
found = [measure(f"cuda:{index}") for index in range(torch.cuda.device_count())]
print(json.dumps([[h.compute_capability, [p for p, c in h.precisions.items() if c.level == "native"]] for h in found]))
"""


def measured(environment: dict[str, str]) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE_ALL],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_card_can_do_what_its_compute_capability_says(virtual_machine: VirtualMachine) -> None:
    found = measured(virtual_machine(num=7, cc="6.1,7.5,8.0,8.6,8.9,9.0,12.0"))
    assert found == [
        ["6.1", []],  # no kernels for it in today's builds
        ["7.5", ["fp32", "fp16"]],
        ["8.0", ["fp32", "tf32", "bf16", "fp16"]],
        ["8.6", ["fp32", "tf32", "bf16", "fp16"]],
        ["8.9", ["fp32", "tf32", "bf16", "fp16", "fp8"]],
        ["9.0", ["fp32", "tf32", "bf16", "fp16", "fp8"]],
        ["12.0", ["fp32", "tf32", "bf16", "fp16", "fp8"]],
    ]


@pytest.mark.parametrize("visible", ["2,0", "GPU-000000a2,GPU-000000a0"])
def test_visible_devices_are_measured_in_their_order(visible: str, virtual_machine: VirtualMachine) -> None:
    environment = virtual_machine(num=3, cc="8.0,7.5,9.0")
    assert [capability for capability, _ in measured({**environment, "CUDA_VISIBLE_DEVICES": visible})] == [
        "9.0",
        "8.0",
    ]


def test_no_visible_device_is_said_with_the_variable(cli: CommandLine, virtual_machine: VirtualMachine) -> None:
    cli.environment |= {**virtual_machine(num=2), "CUDA_VISIBLE_DEVICES": "7"}
    done = cli("probe", "--device", "cuda")
    assert done.code == 2
    assert "CUDA_VISIBLE_DEVICES is '7'" in done.err


def test_a_mig_instance_is_a_card(cli: CommandLine, virtual_machine: VirtualMachine) -> None:
    cli.environment |= {**virtual_machine(), "CUDA_VISIBLE_DEVICES": "MIG-000000a0-1111-2222-3333-444444444444"}
    done = cli("probe", "--json")
    assert done.code == 0, done.err
    assert done.document["hardware"]["device"] == "cuda:0"


def test_slow_clocks_are_said(cli: CommandLine, virtual_machine: VirtualMachine) -> None:
    cli.environment |= virtual_machine(throttle="40")
    done = cli("probe", "--json")
    assert any("heat" in note for note in done.document["hardware"]["notes"]), done.document
