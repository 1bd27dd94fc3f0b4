from __future__ import annotations

import json
import subprocess
import sys

import pytest

from autotune_amp.precision import as_found

CHANGE_AND_TAKE_OVER = """
import json, sys, torch
from autotune_amp import torch_state, precision
first = torch_state.capture()
{change}
changed = torch_state.capture()
torch_state.apply(first)
assert torch_state.capture() == first, (first, torch_state.capture())
torch_state.apply(changed)
assert torch_state.capture() == changed, (changed, torch_state.capture())
print(json.dumps([first, changed]))
"""


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("torch.set_num_threads(1 + torch.get_num_threads())", "num_threads"),
        ("torch.set_float32_matmul_precision('high')", "float32_matmul_precision"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "cuda.matmul.fp32_precision"),
        ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", "cudnn.conv.fp32_precision"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "cuda.matmul.fp32_precision"),
        ("torch.backends.fp32_precision = 'tf32'", "cuda.matmul.fp32_precision"),
        ("torch.backends.cudnn.benchmark = True", "cudnn.benchmark"),
        ("torch.use_deterministic_algorithms(True)", "deterministic_algorithms"),
        ("torch.set_default_dtype(torch.bfloat16)", "default_dtype"),
    ],
)
def test_a_changed_state_is_seen_and_can_be_taken_over(change: str, key: str) -> None:
    program = CHANGE_AND_TAKE_OVER.format(change=change)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, changed = json.loads(done.stdout)
    assert first[key] != changed[key]


STRICT = """
import torch
from autotune_amp import precision
torch.set_float32_matmul_precision("medium")
precision.set_flags("{precision}")
flags = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
print([flag.fp32_precision for flag in flags], torch.backends.mkldnn.matmul.fp32_precision,
      torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())
"""


@pytest.mark.parametrize("spelling", ["torch.backends.fp32_precision", "torch.backends.cuda.matmul.fp32_precision"])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_strict_flags_win_over_the_newer_spelling(spelling: str, precision: str) -> None:
    program = STRICT.format(precision=precision).replace(
        'torch.set_float32_matmul_precision("medium")', f"{spelling} = 'tf32'" if precision == "fp32" else ""
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("tf32" in done.stdout) == (precision == "tf32")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_strict_flags_have_tf32_off_everywhere_and_can_be_read_either_way(precision: str) -> None:
    done = subprocess.run([sys.executable, "-c", STRICT.format(precision=precision)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tf32" not in done.stdout
    assert done.stdout.strip().endswith("ieee False False highest")


def test_tf32_flags_are_on_and_can_be_read_either_way() -> None:
    done = subprocess.run([sys.executable, "-c", STRICT.format(precision="tf32")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("ieee True True high")


def state(matmul: str, conv: str, rnn: str, autocast: str | None = None) -> dict[str, str | None]:
    flags = {"cuda.matmul": matmul, "cudnn.conv": conv, "cudnn.rnn": rnn}
    mkldnn = {f"mkldnn.{op}.fp32_precision": "none" for op in ("matmul", "conv", "rnn")}
    return {f"{k}.fp32_precision": v for k, v in flags.items()} | mkldnn | {"autocast.cuda": autocast}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (state("none", "tf32", "tf32"), ("fp32", False)),  # PyTorch's default
        (state("ieee", "ieee", "none"), ("fp32", True)),
        (state("tf32", "tf32", "tf32"), ("tf32", True)),
        (state("none", "none", "none", "bfloat16"), ("bf16", True)),
        (state("none", "tf32", "tf32", "float16"), ("fp16", False)),
    ],
)
def test_what_the_callers_flags_amount_to(found: dict[str, str | None], expected: tuple[str, bool]) -> None:
    assert as_found(found, "cuda") == expected


def test_on_a_cpu_cuda_flags_say_nothing() -> None:
    assert as_found(state("none", "tf32", "tf32"), "cpu") == ("fp32", True)
