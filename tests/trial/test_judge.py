"""The one judge: every row as the evidence of a Workload's processes and as that of a command's."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import said
import torch
from scripted_process import FIRST, Script
from torch import Tensor, nn

from autotune_amp import Workload
from autotune_amp.command.measure import measurement
from autotune_amp.command.verdict import RunState, verdict
from autotune_amp.core.config import LossScale
from autotune_amp.core.job import ChildExit, Deadlines, JobEvent, Ready
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.processes import process
from autotune_amp.processes.ranks import _causing_failure_of_ranks
from autotune_amp.trial import failures, worker
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.judge import (
    RaisedError,
    StepLosses,
    failure_from_error,
    failure_from_exit,
    failure_from_memory,
    failure_from_steps,
)

NAN, INF = float("nan"), float("inf")
# Triton's own errors are no RuntimeErrors, unless the compiler of PyTorch wraps them.
OutOfResources = type("OutOfResources", (Exception,), {})
GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5")
CUDA_FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

ways = pytest.mark.parametrize("is_command", [False, True], ids=["workload", "command"])


def of_command(errors: Iterable[tuple[int, BaseException]], num_ranks: int, share: float | None = None) -> Failure:
    heard = said.trained([5] * num_ranks)
    for rank, error in errors:
        types = tuple(kind.__name__ for kind in type(error).__mro__)
        message = said.error(100 + rank, types[0], str(error), rank, num_ranks, types=types, free_memory_share=share)
        heard.add(message)
    return judged(heard, RunState(seconds=1.0, seconds_since_step=1.0))


def judged(heard: Any, seen: RunState) -> Failure:
    deadlines = Deadlines(whole_seconds=100, first_step_seconds=50, step_seconds=10)
    found = verdict(heard, seen, deadlines, is_enough=False, memory_limit_bytes=None)
    assert isinstance(found, Failure)
    return found


@ways
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CUDA_FULL, "oom"),
        (MemoryError(), "oom"),
        (OSError(12, "Cannot allocate memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), "oom"),
        (RuntimeError("\"addmm_cuda\" not implemented for 'Half'"), "unsupported"),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "unsupported"),
        (RuntimeError("FlashAttention only support fp16 and bf16 data type"), "unsupported"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"), "unsupported"),
        (OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376."), "unsupported"),
        (RuntimeError("CUDA error: device-side assert triggered"), "workload_error"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "workload_error"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasLtMatmul`"), "workload_error"),
        (ValueError("No available kernel"), "workload_error"),
        (IndexError("the queue is out of memory slots"), "workload_error"),
        (ModuleNotFoundError("No module named 'flash_attn.layers'"), "workload_error"),
        # What libraries also say for other reasons is out of memory only where memory is short.
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), None),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), None),
        (RuntimeError("GET was unable to find an engine to execute this computation"), None),
    ],
)
@pytest.mark.parametrize("share", [None, 0.5, 0.05])
def test_an_exception(
    error: Exception, kind: str | None, share: float | None, monkeypatch: pytest.MonkeyPatch, *, is_command: bool
) -> None:
    monkeypatch.setattr(failures, "free_memory_share", lambda: share)
    found = of_command([(0, error)], 1, share) if is_command else failures.failure_from_exception(error)
    assert found.kind == (kind or ("oom" if share == 0.05 else "workload_error"))
    assert found.message.startswith(type(error).__name__)
    if isinstance(error, ModuleNotFoundError):
        assert (found.details or "").startswith("Install flash_attn ")


@ways
@pytest.mark.parametrize("is_oom_killed", [False, True])
def test_a_worker_of_a_loader_that_the_kernel_killed(*, is_oom_killed: bool, is_command: bool) -> None:
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    if is_command:
        heard = said.trained([5])
        heard.add(said.error(100, "RuntimeError", str(error)))
        found = judged(heard, RunState(seconds=1.0, seconds_since_step=1.0, is_oom_killed=is_oom_killed))
    else:
        found = failures.failure_from_exception(error, is_oom_killed=is_oom_killed)
    assert found.kind == ("oom" if is_oom_killed else "workload_error")


@ways
@pytest.mark.parametrize(
    ("errors", "kind", "rank"),
    [
        ([GLOO, CUDA_FULL], "oom", 1),
        ([ValueError("a lost connection made this"), GLOO, CUDA_FULL], "oom", 2),
        ([RuntimeError("CUDA error: unspecified launch failure"), CUDA_FULL], "oom", 1),
        ([GLOO, RuntimeError("\"addmm\" not implemented for 'Half'")], "unsupported", 1),
        ([GLOO, ValueError("of its own")], "workload_error", 1),
        ([GLOO, GLOO], "workload_error", 0),
    ],
)
def test_the_cause_among_ranks(errors: Sequence[Exception], kind: str, rank: int, *, is_command: bool) -> None:
    found = (
        of_command(enumerate(errors), len(errors))
        if is_command
        else _causing_failure_of_ranks([failures.failure_from_exception(error) for error in errors])
    )
    assert found.kind == kind
    assert f"rank {rank}: " in f"rank 0: {found.message}"


FULL = "Traceback ...\ntorch.OutOfMemoryError: CUDA out of memory."
HALF = "Traceback ...\nRuntimeError: \"addmm\" not implemented for 'Half'\n"


@ways
@pytest.mark.parametrize(
    ("status", "is_oom_killed", "printed", "kind", "says"),
    [
        (-signal.SIGKILL, True, "", "oom", "memory"),
        (-signal.SIGKILL, False, "", "crash", "SIGKILL"),
        (-signal.SIGSEGV, True, "", "crash", "segmentation fault"),  # another process was out of memory meanwhile
        (-signal.SIGABRT, False, "terminate called after throwing an instance of 'std::bad_alloc'", "oom", "memory"),
        (-40, True, "", "crash", "40"),
        (137, True, "", "oom", "memory"),  # by way of a shell
        (7, False, "", "crash", "status 7"),
        (1, False, FULL, "oom", "memory"),
        (1, False, HALF, "unsupported", "status 1"),  # a script that prints its error and exits
        (1, False, f"{HALF}ValueError: another", "crash", "status 1"),
    ],
)
def test_an_exit(
    status: int,
    is_oom_killed: bool,
    printed: str,
    kind: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_command: bool,
) -> None:
    if is_command:
        seen = RunState(
            seconds=1.0, seconds_since_step=1.0, status=status, printed=printed, is_oom_killed=is_oom_killed
        )
        found = judged(said.trained([2]), seen)
    else:
        kills = iter((3, 3 + is_oom_killed))
        monkeypatch.setattr(process, "num_oom_kills", lambda: next(kills))
        script = Script((1.0, FIRST), (1.0, ChildExit(status)))
        script.printed = printed
        found = script.failure(100.0, monkeypatch, ends_with_exit=True)
    assert found.kind == kind
    assert says in found.message


def test_what_a_process_that_exits_without_an_error_has_printed_is_not_its_end() -> None:
    assert failure_from_exit(0, FULL).kind == "crash"


@ways
@pytest.mark.parametrize("is_ready", [False, True])
def test_a_hang(monkeypatch: pytest.MonkeyPatch, *, is_ready: bool, is_command: bool) -> None:
    if is_command:
        heard = said.trained([5]) if is_ready else said.heard([said.hello(1), said.torch(1)])
        found = judged(heard, RunState(seconds=50.0 if is_ready else 101.0, seconds_since_step=50.0))
    else:
        begun: list[tuple[float, JobEvent]] = [(0.5, Ready()), (0.5, FIRST)]
        found = Script(*begun * is_ready).failure(100.0, monkeypatch)
    assert (found.kind, found.is_loading) == ("timeout", not is_ready)


class Losses(NamedTuple):
    """A training whose losses from step `first` to `last` are multiplied by `factor`, and the steps that its scaler
    skips, where it has one."""

    factor: float = 1.0
    first: int = 1
    last: int = 10**9
    skips: range | None = None  # None without a scaler


NUM_STEPS = 30
ALL = range(1, NUM_STEPS + 1)


def of_workload(given: Losses) -> Any:
    """What a trial of it gives; what its losses do to the weights and to the scaler is their own doing."""
    numbers = itertools.count(1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        is_changed = given.first <= next(numbers) <= given.last
        found: Tensor = model(batch).float().square().mean()
        return found * (given.factor if is_changed else 1.0)

    torch.manual_seed(0)
    workload = Workload(lambda: nn.Linear(4, 1), loss, lambda size: torch.ones(size, 4))
    trial = Trial(
        candidate=Setting(precision="fp32" if given.skips is None else "fp16", batch_size=4),
        device="cpu",
        torch_state=torch_state.capture(),
        loss_scale=None if given.skips is None else LossScale(init_scale=2.0**24 if len(given.skips) > 1 else 1.0),
        num_steps=(NUM_STEPS, NUM_STEPS),
    )
    return worker.run(Context(workload, is_kept=True), trial, lambda _: None)


def of_steps(given: Losses) -> Any:
    """What a command gives whose agent told of such steps."""
    heard = said.trained([0])
    heard.add(said.optimizer(100))
    for number in ALL:
        bad = given.first <= number <= given.last and given.factor != 1.0
        loss = str(given.factor) if bad and abs(given.factor) != 1e30 else 1.0
        heard.add(said.step(100, number, losses=(loss,), is_skipped=number in (given.skips or ())))
    setting = Setting(precision="fp32", batch_size=8)
    return measurement(heard, Trial(candidate=setting, device="cpu"), 0.0, 0)


@ways
@pytest.mark.parametrize(
    ("losses", "says"),
    [
        (Losses(), None),
        (Losses(NAN), "nan"),
        (Losses(INF), ""),
        (Losses(NAN, first=10), "nan"),
        (Losses(INF, first=10), ""),
        (Losses(NAN, first=NUM_STEPS), "nan"),  # the last step, after which nobody sees what became of the weights
        # A step that the scaler skips is no failure by itself, whatever its loss.
        (Losses(skips=range(1, 12)), None),
        (Losses(NAN, first=10, last=10, skips=range(10, 11)), None),
        (Losses(INF, first=20, last=20, skips=range(20, 21)), None),
        (Losses(NAN, skips=ALL), "nan"),
        (Losses(INF, skips=ALL), "inf"),
        (Losses(NAN, first=10, skips=range(10, NUM_STEPS + 1)), "nan"),
        (Losses(1e30, skips=ALL), "overflow"),  # of a loss that is finite
    ],
)
def test_losses(losses: Losses, says: str | None, *, is_command: bool) -> None:
    found: Callable[[Losses], Any] = of_steps if is_command else of_workload
    outcome = found(losses)
    if says is None:
        assert isinstance(outcome, Measurement), outcome
        return
    assert isinstance(outcome, Failure)
    assert outcome.kind == "nonfinite"
    assert says in outcome.message


def test_a_loss_that_is_not_finite_once_is_forgiven_by_the_next_step() -> None:
    fine, bad, skipped = (
        StepLosses(losses=(loss,), is_skipped=is_skipped)
        for loss, is_skipped in ((1.0, False), (NAN, False), (NAN, True))
    )

    def is_good(*steps: StepLosses, goes_on: bool = False) -> bool:
        return failure_from_steps(steps, goes_on=goes_on) is None

    assert is_good(fine, bad, fine)  # a guard of the script's own left it out
    assert not is_good(fine, bad)
    assert is_good(fine, bad, goes_on=True)
    assert is_good(fine, bad, bad, goes_on=True)
    assert not is_good(fine, bad, bad, bad, goes_on=True)
    assert is_good(fine, skipped, skipped)
    assert not is_good(fine, skipped, skipped, skipped)
    assert is_good(*[StepLosses(is_skipped=True)] * 19, goes_on=True)
    assert not is_good(*[StepLosses(is_skipped=True)] * 20, goes_on=True)
    assert is_good(*[StepLosses()] * 20), "whose losses nobody saw"


def test_memory_over_its_limit_or_flushed_is_out_of_memory() -> None:
    def kind(num_bytes: int, limit_bytes: int | None, **fields: Any) -> str | None:
        found = failure_from_memory(num_bytes, limit_bytes, **fields)
        return None if found is None else found.kind

    assert kind(3, 2) == "oom"
    assert kind(2, 2, has_flushed=True) == "oom"
    assert kind(2, 2) is None
    assert kind(3, None) is None


def test_an_error_without_words_has_a_name() -> None:
    found = failure_from_error(RaisedError(types=("KeyError", "LookupError"), message="\n"))
    assert found == Failure(kind="workload_error", message="KeyError: ")
