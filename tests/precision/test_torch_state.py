from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from autotune_amp.precision.mode import CUDA_FLAGS, as_found

# Runs programs in processes of their own, forked where PyTorch is imported and nothing else was done.
FORKS = """
import json, os, sys
import torch
from autotune_amp.precision import mode as precision
from autotune_amp.precision import torch_state
for line in sys.stdin:
    program, path = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    said = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    exec(program)
    break
"""
Run: TypeAlias = Callable[[str], str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Gives what a program in a fresh process prints; an assertion fails where it does not end well."""
    folder = tmp_path_factory.mktemp("said")
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answered = process.stdin, process.stdout

        def ask(program: str) -> str:
            said = folder / str(len(list(folder.iterdir())))
            asked.write(json.dumps([program, str(said)]) + "\n")
            asked.flush()
            code = int(answered.readline())
            assert code == 0, said.read_text()
            return said.read_text()

        yield ask
        asked.close()


CHANGE_AND_TAKE_OVER = """
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
def test_a_changed_state_is_seen_and_can_be_taken_over(run: Run, change: str, key: str) -> None:
    first, changed = json.loads(run(CHANGE_AND_TAKE_OVER.format(change=change)))
    assert first[key] != changed[key]


STRICT = """
torch.set_float32_matmul_precision("medium")
precision.set_flags("{precision}")
flags = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
print([flag.fp32_precision for flag in flags], torch.backends.mkldnn.matmul.fp32_precision,
      torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())
"""


@pytest.mark.parametrize("spelling", ["torch.backends.fp32_precision", "torch.backends.cuda.matmul.fp32_precision"])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_strict_flags_win_over_the_newer_spelling(run: Run, spelling: str, precision: str) -> None:
    program = STRICT.format(precision=precision).replace(
        'torch.set_float32_matmul_precision("medium")', f"{spelling} = 'tf32'" if precision == "fp32" else ""
    )
    assert ("tf32" in run(program)) == (precision == "tf32")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_strict_flags_have_tf32_off_everywhere_and_can_be_read_either_way(run: Run, precision: str) -> None:
    found = run(STRICT.format(precision=precision))
    assert "tf32" not in found
    assert found.strip().endswith("ieee False False highest")


def test_tf32_flags_are_on_and_can_be_read_either_way(run: Run) -> None:
    assert run(STRICT.format(precision="tf32")).strip().endswith("ieee True True high")


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


@pytest.mark.parametrize(
    ("found", "idle", "expected"),
    [
        (state("none", "tf32", "tf32"), CUDA_FLAGS, ("fp32", True)),  # no TF32 on the device
        (state("tf32", "tf32", "tf32"), CUDA_FLAGS, ("fp32", True)),
        (state("none", "tf32", "tf32", "float16"), CUDA_FLAGS, ("fp16", True)),
        (state("none", "tf32", "tf32"), ("cudnn.conv", "cudnn.rnn"), ("fp32", True)),
        (state("none", "tf32", "tf32"), ("cudnn.rnn",), ("fp32", False)),
        (state("tf32", "tf32", "ieee"), ("cudnn.rnn",), ("tf32", True)),
        (state("tf32", "ieee", "ieee"), ("cudnn.conv", "cudnn.rnn"), ("tf32", True)),
    ],
)
def test_flags_that_concern_nothing_that_runs_do_not_count(
    found: dict[str, str | None], idle: tuple[str, ...], expected: tuple[str, bool]
) -> None:
    assert as_found(found, "cuda", idle) == expected


def test_on_a_cpu_cuda_flags_say_nothing() -> None:
    assert as_found(state("none", "tf32", "tf32"), "cpu") == ("fp32", True)


KEPT = """
from torch import nn
from autotune_amp import AmpConfig, PrecisionController
found = torch_state.capture()
config = AmpConfig(precision="bf16", batch_size=4, fallback=["fp32"], as_found={as_found})
controller = PrecisionController(config, "cpu")
controller.attach(nn.Linear(2, 2))
kept = [torch_state.capture() == found]
for precision in ("fp32", "bf16"):
    controller.set_precision(precision)
    kept.append(torch_state.capture() == found)
print(kept)
"""


@pytest.mark.parametrize(("as_found", "kept"), [(True, "[True, False, True]"), (False, "[False, False, False]")])
def test_a_controller_keeps_the_flags_as_found_until_it_steps_down(run: Run, as_found: bool, kept: str) -> None:
    assert run(KEPT.format(as_found=as_found)).splitlines()[-1] == kept  # the moves are said before it
