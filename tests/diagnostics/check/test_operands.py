"""Each operation run for real on this CPU with operands of every mix of dtypes: a check finds what raises, and no more.

A new torch whose kernels take more dtypes, or fewer, than tensors without data say is noticed here.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from operand_samples import OPERATIONS, PRODUCTS, WRITES, Operation
from torch import nn

from autotune_amp.diagnostics.check.operands import OperandCheck
from autotune_amp.diagnostics.check.recording import StepRecorder
from autotune_amp.precision.rules import AutocastDevice

pytestmark = pytest.mark.filterwarnings("ignore")  # what the operations themselves warn of

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Which of the three operands are in half precision.
MIXES = ((False, True, True), (True, False, False), (False, False, True), (True, True, False), (True, True, True))


def operands() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(8, 8, generator=generator) + 0.5 for _ in range(3)]


def precisions_that_raise(operation: Operation, mix: tuple[bool, ...], has_autocast: bool) -> set[str]:
    raising = set()
    for precision, dtype in LOW.items():
        given = [one.to(dtype) if is_half else one for one, is_half in zip(operands(), mix, strict=True)]
        try:
            with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=has_autocast):
                operation(*given)
        except RuntimeError:
            raising.add(precision)
    return raising


def found(
    operation: Operation, mix: tuple[bool, ...], has_autocast: bool, device: AutocastDevice = "cpu"
) -> dict[str, set[str]]:
    """By rule, the precisions in which a check says that the operation breaks."""
    recording = StepRecorder(nn.Module(), device)
    with recording.recording(), torch.no_grad():
        given = [one.half() if is_half else one for one, is_half in zip(operands(), mix, strict=True)]
        recording.findings.clear()  # of those casts
        with recording.autocast() if has_autocast else nullcontext():
            operation(*given)
    return {finding.rule: set(finding.precisions) for finding in recording.findings if finding.severity == "breaks"}


@pytest.mark.parametrize("has_autocast", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_what_raises_on_this_cpu_is_found_and_nothing_else(mix: tuple[bool, ...], has_autocast: bool) -> None:
    differences = {}
    for name, operation in OPERATIONS.items():
        raising = precisions_that_raise(operation, mix, has_autocast)
        said = found(operation, mix, has_autocast)
        if set().union(*said.values()) != raising:
            differences[name] = raising, said
    assert differences == {}


def test_the_cpus_kernels_are_asked_past_autocast_which_has_cast_already() -> None:
    operands = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(RuntimeError, match="same dtype"):
        OperandCheck("cpu").__torch_dispatch__(torch.ops.aten.mm.default, (), operands)


# -- what only the lists of CUDA's and MPS's autocast decide -----------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_what_an_accelerators_autocast_casts_itself_is_no_finding(device: AutocastDevice) -> None:
    mixed = (False, True, True)
    cast = set(PRODUCTS) - {"weighted bags", "vdot"}  # MPS does not list vdot
    cast |= {"scatter_add", "index_put", "layer_norm", "mse_loss", "cdist", "prelu"}
    assert {name: said for name in sorted(cast) if (said := found(OPERATIONS[name], mixed, True, device))} == {}
    kept = ("index_add_", "index_put_", "rows set", "scatter_", "masked_scatter_", "addmm_", "lerp", "linalg.cross")
    assert {name for name in kept if "mixed_operands" not in found(OPERATIONS[name], mixed, True, device)} == set()


@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
def test_norms_of_half_precision_with_weights_in_fp32_break_on_cuda_where_autocast_is_off(name: str) -> None:
    half_input = (True, False, False)
    assert found(OPERATIONS[name], half_input, False, "cuda") == {"mixed_operands": {"fp16", "bf16"}}
    assert found(OPERATIONS[name], half_input, True, "cuda") == {}
    assert found(OPERATIONS[name], half_input, False, "cpu") == {}
    assert found(OPERATIONS["batch_norm"], half_input, False, "cuda") == {}  # its kernels take both


@pytest.mark.parametrize(
    ("name", "has_autocast", "rule", "precisions"),
    [
        ("quantile", True, "half_kernels", {"fp16", "bf16"}),
        ("cdist", False, "half_kernels", {"fp16", "bf16"}),
        ("complex", True, "half_kernels", {"bf16"}),
        ("polar", True, "half_kernels", {"bf16"}),
        ("view_as_complex", True, "half_kernels", {"bf16"}),
        ("solve", True, "linear_algebra", {"fp16", "bf16"}),
        ("fft", True, "fft", {"bf16"}),
    ],
)
def test_what_has_no_kernel_for_half_precision_on_cuda(
    name: str, has_autocast: bool, rule: str, precisions: set[str]
) -> None:
    assert found(OPERATIONS[name], (True, True, True), has_autocast, "cuda") == {rule: precisions}


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_mask_of_another_dtype_breaks_attention_where_autocast_is_off(device: AutocastDevice) -> None:
    mask_in_half = (False, True, False)
    attention = OPERATIONS["attention with a mask"]
    assert found(attention, mask_in_half, False, device) == {"mixed_operands": {"fp16", "bf16"}}
    assert found(attention, mask_in_half, True, device) == {}


@pytest.mark.slow
def test_operands_of_one_dtype_are_written_without_a_finding() -> None:
    for device in ("cuda", "mps", "cpu"):
        for mix in ((False, False, False), (True, True, True)):
            said = {name: found(operation, mix, True, device) for name, operation in WRITES.items()}
            assert {name: rules for name, rules in said.items() if rules} == {}
