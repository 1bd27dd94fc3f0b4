"""The flags that say how fp32 is computed: set for a precision, read in the caller, taken over elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from autotune_amp.core.precisions import PRECISIONS as ALL_PRECISIONS
from autotune_amp.core.precisions import autocast_precision
from autotune_amp.dimensions.attention import ATTENTION
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.precision import torch_state
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.torch_state import CUDA_FLAGS, FP32_PRECISION_FLAGS, precision_of_state

# In a process of its own, where every flag is as PyTorch begins with it.
PROGRAM = """
import json, sys
from operator import attrgetter
import torch
from torch import nn
from autotune_amp import AmpConfig, PrecisionController
from autotune_amp.precision import torch_state

changes, precisions = json.loads(sys.argv[1])
first = torch_state.capture()
taken_over = {}
for change, key in changes.items():
    exec(change)
    changed = torch_state.capture()
    torch_state.apply(first)
    goes_back = torch_state.capture() == first
    torch_state.apply(changed)
    taken_over[change] = [first[key] != changed[key], goes_back, torch_state.capture() == changed]
    torch_state.apply(first)

def flags():
    leaves = {flag: attrgetter(f"{flag}.fp32_precision")(torch.backends) for flag in torch_state.FP32_PRECISION_FLAGS}
    legacy = [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
    return leaves, legacy, torch.get_float32_matmul_precision()

strict = {}
for precision in precisions:
    for before in ("tf32 everywhere", "tf32 in cuDNN", "bf16 in oneDNN", "as found"):
        torch_state.apply(first)
        if before == "tf32 everywhere":
            torch.backends.fp32_precision = "tf32"
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        elif before == "tf32 in cuDNN":
            torch.backends.cudnn.fp32_precision = "tf32"
        elif before == "bf16 in oneDNN":
            for operation in ("matmul", "conv", "rnn"):
                getattr(torch.backends.mkldnn, operation).fp32_precision = "bf16"
        torch_state.set_flags(precision)
        strict[f"{precision}, {before}"] = flags()
torch_state.apply(first)

kept = {}
for is_as_found in (True, False):
    config = AmpConfig(precision="bf16", batch_size=4, fallback=["fp32"], as_found=is_as_found)
    controller = PrecisionController(config, "cpu")
    controller.attach(nn.Linear(2, 2))
    kept[str(is_as_found)] = [torch_state.capture() == first]
    for precision in ("fp32", "bf16"):
        controller.set_precision(precision)
        kept[str(is_as_found)].append(torch_state.capture() == first)
print(json.dumps([taken_over, strict, kept]))
"""
CHANGES = {
    "torch.set_num_threads(1 + torch.get_num_threads())": "num_threads",
    "torch.set_float32_matmul_precision('high')": "float32_matmul_precision",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'": "cudnn.conv.fp32_precision",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "cuda.matmul.fp32_precision",
    "torch.backends.fp32_precision = 'tf32'": "cuda.matmul.fp32_precision",
    "torch.backends.cudnn.benchmark = True": "cudnn.benchmark",
    "torch.backends.cuda.matmul.allow_fp16_accumulation = True": "cuda.matmul.allow_fp16_accumulation",
    "torch.use_deterministic_algorithms(True)": "deterministic_algorithms",
    "torch.set_default_dtype(torch.bfloat16)": "default_dtype",
}
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@pytest.fixture(scope="module")
def said() -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([CHANGES, PRECISIONS])], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # the controller's moves are said before it


def test_a_changed_state_is_seen_and_can_be_taken_over(said: Any) -> None:
    assert said[0] == {change: [True, True, True] for change in CHANGES}


@pytest.mark.slow
def test_strict_flags_are_set_everywhere_and_can_be_read_either_way(said: Any) -> None:
    assert len(said[1]) == 4 * len(PRECISIONS)
    for case, (leaves, legacy, matmul) in said[1].items():
        is_tf32 = case.startswith("tf32,")
        assert leaves.keys() == set(FP32_PRECISION_FLAGS)
        for flag, value in leaves.items():
            # oneDNN's reduced modes are no part of any precision.
            assert value == "ieee" if flag.startswith("mkldnn") else (value == "tf32") == is_tf32, (case, flag)
        assert (legacy, matmul) == ([is_tf32, is_tf32], "high" if is_tf32 else "highest"), case


def test_a_controller_keeps_the_flags_as_found_until_it_steps_down(said: Any) -> None:
    assert said[2] == {"True": [True, False, True], "False": [False, False, False]}


def state(matmul: str, conv: str, rnn: str, autocast: str | None = None, mkldnn: str = "none") -> dict[str, str | None]:
    flags = dict(zip(FP32_PRECISION_FLAGS, (matmul, conv, rnn, mkldnn, mkldnn, mkldnn), strict=True))
    return {f"{flag}.fp32_precision": value for flag, value in flags.items()} | {
        f"autocast.{device}": autocast for device in ("cuda", "cpu")
    }


@pytest.mark.parametrize(
    ("found", "device", "idle", "expected"),
    [
        (state("none", "tf32", "tf32"), "cuda", (), ("fp32", False)),  # PyTorch's default
        (state("ieee", "ieee", "none"), "cuda", (), ("fp32", True)),
        (state("tf32", "tf32", "tf32"), "cuda", (), ("tf32", True)),
        (state("none", "tf32", "tf32", "float16"), "cuda", (), ("fp16", False)),
        # Flags that concern nothing that runs do not count.
        (state("tf32", "tf32", "tf32"), "cuda", CUDA_FLAGS, ("fp32", True)),
        (state("none", "tf32", "tf32"), "cuda", ("cudnn.conv", "cudnn.rnn"), ("fp32", True)),
        (state("tf32", "tf32", "ieee"), "cuda", ("cudnn.rnn",), ("tf32", True)),
        # On a CPU CUDA's flags say nothing, and oneDNN's do.
        (state("none", "tf32", "tf32"), "cpu", (), ("fp32", True)),
        (state("none", "none", "none", mkldnn="bf16"), "cpu", (), ("fp32", False)),
        (state("none", "none", "none", "bfloat16"), "cpu", (), ("bf16", True)),
    ],
)
def test_what_the_callers_flags_amount_to(
    found: dict[str, str | None], device: str, idle: tuple[str, ...], expected: tuple[str, bool]
) -> None:
    assert precision_of_state(found, device, idle) == expected


def test_modes_are_in_the_order_of_risk_and_know_their_formats() -> None:
    assert tuple(MODES) == ALL_PRECISIONS
    assert [name for name, mode in MODES.items() if mode.takes_scaler] == ["fp16"]
    assert [name for name, mode in MODES.items() if mode.uses_autocast] == ["bf16", "fp16", "fp8"]
    rungs = {name: mode.rungs_below for name, mode in MODES.items()}
    assert rungs["fp32"] == ()
    assert rungs["tf32"] == rungs["bf16"] == ("fp32",)
    assert rungs["fp16"] == rungs["fp8"] == ("bf16", "fp32")
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, mode in MODES.items():
        if name in dtypes:
            info = torch.finfo(dtypes[name])
            assert (mode.format_max, mode.unit_roundoff) == (info.max, info.eps / 2), name
    assert MODES["fp8"].unit_roundoff == torch.finfo(torch.float8_e4m3fn).eps / 2
    assert MODES["fp8"].format_max == MODES["bf16"].format_max, "between its layers"
    assert [autocast_precision(name) for name in MODES] == ["fp32", "tf32", "bf16", "fp16", "bf16"]


class LazyOrder:
    """torch's order of attention backends on an H100: the first call there sets it, over one that was set before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order, self.is_set = [1, 2, 0, 3, 4], False
        monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: self.order)
        monkeypatch.setattr(torch._C, "_set_sdp_priority_order", lambda order: setattr(self, "order", order))
        monkeypatch.setattr(torch, "_fused_sdp_choice", self.attend)
        monkeypatch.setattr(torch_state, "started_accelerator", lambda: torch.device("cpu"))
        monkeypatch.setattr(torch_state, "_torchs_sdp_order", [])

    def attend(self, *_: Any) -> int:
        self.order = self.order if self.is_set else [3, 1, 2, 0, 4]
        self.is_set = True
        return self.order[0]


def test_trials_after_the_first_have_torchs_own_order_of_attention_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy, caller = LazyOrder(monkeypatch), torch_state.capture()
    torch_state.apply_flags(caller)
    assert lazy.attend() == 3
    torch_state.apply_flags(caller)
    assert lazy.attend() == 3
    torch_state.apply_flags(caller | {"sdp_priority_order": [2, 1, 0, 3, 4]})
    assert lazy.attend() == 2, "one that the caller has set"
    torch_state.apply_flags(caller)
    assert lazy.attend() == 3


def test_the_callers_order_of_attention_backends_stays_after_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy, caller = LazyOrder(monkeypatch), torch_state.capture()
    torch_state.apply_flags(caller | {"sdp_priority_order": [2, 1, 0, 3, 4]})
    assert lazy.attend() == 2


def test_torchs_order_is_asked_for_where_the_caller_allows_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_state, "_torchs_sdp_order", [])
    monkeypatch.setattr(torch_state, "started_accelerator", lambda: None)
    before = torch_state.capture()
    kernels = ("flash", "mem_efficient", "math", "cudnn")
    torch_state.apply_flags(before | {f"cuda.{kernel}_sdp": False for kernel in kernels})
    try:
        assert torch_state.default_sdp_order(torch.device("cpu")) == before["sdp_priority_order"]
        assert not torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]
    finally:
        torch_state.apply_flags(before)


def test_a_preferred_backend_is_set_on_the_models_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    LazyOrder(monkeypatch)
    asked: list[torch.device] = []
    monkeypatch.setattr(torch_state, "started_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch_state, "default_sdp_order", asked.append)
    ATTENTION.change("efficient", LiveTraining([], [], torch.device("cuda:1")))()
    assert asked == [torch.device("cuda:1")]
    ATTENTION.change("efficient", LiveTraining([], [], torch.device("cpu")))()
    assert asked == [torch.device("cuda:1"), torch.device("cuda")], "weights on the CPU may be offloaded"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_preferred_backend_is_used_from_the_first_call_on(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    lazy = LazyOrder(monkeypatch)
    if not is_first:
        lazy.attend()
    undo = ATTENTION.change("efficient", LiveTraining([], [], torch.device("cpu")))
    assert lazy.attend() == 2
    undo()
    assert lazy.attend() == 3
