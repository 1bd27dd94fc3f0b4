"""What a process does for its jobs: what a step runs, the mean step, the end of a confirmation."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from listening import Listener
from torch import Tensor, nn
from torch.nn.functional import conv2d
from torch.utils.data import DataLoader

from autotune_amp import Workload
from autotune_amp.core.hardware import DeviceMemory, Hardware
from autotune_amp.core.job import JobEvent, Phase
from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.hardware import identify
from autotune_amp.precision import torch_state
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.trial import memory, worker, worst_batch
from autotune_amp.trial.context import Context, make_model, move_to_accelerator, restore_on_cpu
from autotune_amp.trial.jobs import Describe, ProbeJob, Trial
from autotune_amp.trial.timing import Timing
from autotune_amp.trial.worker import cudnn_flags_in_use, users_precision

pytestmark = pytest.mark.usefixtures("forked_processes")


def test_the_callers_flags_are_applied_once_more_when_the_device_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of attention backends is known only then."""
    calls = Mock()
    monkeypatch.setattr(torch, "ones", calls.start)
    monkeypatch.setattr(torch.accelerator, "set_device_index", Mock())
    monkeypatch.setattr(torch.accelerator, "synchronize", Mock())
    monkeypatch.setattr(worker, "move_to_accelerator", Mock())
    monkeypatch.setattr(worker, "PeakMemory", Mock())
    monkeypatch.setattr(torch_state, "apply_flags", calls.apply)
    spec = Trial(candidate=Setting(precision="fp32", batch_size=4), device="cuda:0", torch_state={"flag": 1})
    worker.prepare_process(Context(Mock()), spec)
    assert [call[0] for call in calls.mock_calls if "." not in call[0] and "(" not in call[0]] == ["start", "apply"]
    calls.apply.assert_called_once_with({"flag": 1})


def described(workload: Workload, **fields: Any) -> Any:
    asked = Describe(device="cpu", torch_state=torch_state.capture(), **fields)
    return worker.describe(Context(workload, is_kept=False), asked, lambda event: None)


def test_tensors_move_to_the_accelerator_with_their_sign_and_as_views_of_the_same_memory() -> None:
    whole = torch.tensor([1 + 2j, 3 + 4j])
    conjugate, negative, part = (
        restore_on_cpu(view, ()) for view in (whole.conj, lambda: whole.conj().imag, lambda: whole[1:])
    )
    assert negative.is_neg()
    move_to_accelerator(torch.device("cpu"))
    assert conjugate.tolist() == [1 - 2j, 3 - 4j]
    assert negative.tolist() == [-2, -4]
    whole[1] = 5
    assert part.tolist() == [5]


def test_a_model_that_the_workload_put_on_the_gpu_counts_as_the_trials_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Hardware(
        device="cuda:0",
        identity=identify("cpu"),
        compute_capability=None,
        memory=DeviceMemory(total=100, free=50, available=40),
        precisions={},
        notes=(),
    )
    monkeypatch.setattr(worker, "measure", lambda _: measured)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30)
    asked = ProbeJob(device="cuda", torch_state=torch_state.capture())
    found = worker.probe(Context(Mock()), asked, lambda _: None).memory
    assert found == DeviceMemory(total=100, free=80, available=70)


# -- whether a step runs what cuDNN's TF32 flags concern ---------------------------------------------------------------

SPEC = Trial(
    candidate=Setting(precision="fp32", batch_size=4, as_found=True), device="cpu", torch_state=torch_state.capture()
)
CONV, NONE = {"cudnn.conv"}, set[str]()
OFF = {f"{flag}.fp32_precision": "ieee" for flag in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")} | {
    "autocast.cuda": None
}
DEFAULT = OFF | {"cudnn.conv.fp32_precision": "tf32", "cudnn.rnn.fp32_precision": "tf32"}


class Functional(nn.Module):
    """A convolution that no module tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 3, 3))

    def forward(self, images: Tensor) -> Tensor:
        return conv2d(images, self.weight)


def images(batch_size: int) -> Tensor:
    return torch.randn(batch_size, 3, 8, 8)


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def of(model: Callable[[], nn.Module], loss: Callable[..., Tensor] = squared) -> Workload:
    return Workload(model, loss, images, lambda parameters: torch.optim.SGD(parameters, lr=0.01))


def loss_that_fails(model: nn.Module, batch: Tensor) -> Tensor:
    raise ValueError("no step")


def loss_of_an_operator_not_torchs_own(model: nn.Module, batch: Tensor) -> Tensor:
    return squared(model, torch.ops.autotune_amp_tests.unknown(batch))


@torch.library.custom_op("autotune_amp_tests::unknown", mutates_args=())
def unknown(batch: Tensor) -> Tensor:
    return batch * 2


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (of(Functional), CONV),
        (of(lambda: torch.compile(Functional(), backend="eager")), CONV),  # type: ignore[arg-type,return-value]
        (of(lambda: nn.Linear(8, 8)), NONE),
        (of(Functional, loss_that_fails), CONV | {"cudnn.rnn"}),
        (of(lambda: nn.Linear(8, 8), loss_of_an_operator_not_torchs_own), CONV | {"cudnn.rnn"}),
    ],
)
def test_the_flags_that_concern_a_step_are_seen_in_it(workload: Workload, expected: set[str]) -> None:
    assert cudnn_flags_in_use(workload, make_model(workload), SPEC) == expected


def test_a_step_is_taken_where_that_alone_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    model, card = nn.Linear(2, 2), torch.device("cuda")

    def run(state: dict[str, Any], used: set[str], batch_size: int | None = 4, *, has_tf32: bool = True) -> Any:
        cudnn_flags_in_use = Mock(return_value=used)
        monkeypatch.setattr(worker, "cudnn_flags_in_use", cudnn_flags_in_use)
        found = users_precision(of(lambda: model), model, card, state, batch_size, has_tf32=has_tf32)
        return (*found, cudnn_flags_in_use.call_count)

    assert run(DEFAULT, NONE) == ("fp32", True, 1)
    assert run(DEFAULT, CONV) == ("fp32", False, 1)
    assert run(DEFAULT | {"cuda.matmul.fp32_precision": "tf32"}, CONV) == ("tf32", True, 0)
    assert run(OFF, CONV) == ("fp32", True, 0)
    assert run(DEFAULT, CONV, None) == ("fp32", False, 0)
    assert run(DEFAULT, CONV, has_tf32=False) == ("fp32", True, 0)


def test_flags_that_building_sets_are_the_users_own() -> None:
    def model() -> nn.Module:
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]  # torch does not type it
        return nn.Linear(8, 8)

    with torch.autocast("cpu"):
        state = torch_state.capture()
    found = worker.describe(Context(of(model)), Describe(device="cpu", torch_state=state), lambda event: None)
    assert (found.as_found_precision, found.is_as_found_strict) == ("bf16", False)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16"), (None, "fp32")])
def test_a_description_tells_the_format_of_weights_and_looks_at_the_data_only_when_asked(
    dtype: torch.dtype | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worst_batch, "SCAN_SECONDS", 100.0)  # a machine that stalls ends no scan
    words: Any = ["x" * length for length in range(1, 101)]
    model = nn.Linear(2, 2).to(dtype)
    workload = Workload(model, squared, DataLoader(words, batch_size=4))
    assert described(workload).sample_sizes is None
    found = described(workload, baseline_batch_size=32)
    assert (found.weights, found.num_workers, found.sample_sizes.largest_size) == (name, 0, 100)
    if dtype is not None:
        model.requires_grad_(requires_grad=False)
        trained = Workload(nn.Sequential(model, nn.Linear(2, 2)), squared, DataLoader(words, batch_size=4))
        assert described(trained).weights == "frozen_low"


def test_complex_parameters_leave_out_fp16_which_cannot_be_unscaled() -> None:
    model = nn.Linear(2, 2)
    model.mix = nn.Parameter(torch.randn(2, dtype=torch.complex64))
    assert "GradScaler" in described(Workload(model, squared, images)).unsettable["fp16"]
    model.mix.requires_grad_(False)
    assert not described(Workload(model, squared, images)).unsettable


def test_parameters_of_lazy_modules_count_once_they_have_a_shape() -> None:
    found = described(Workload(lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), squared, images))
    assert (found.num_parameters, found.num_trainable_parameters) == (6, 6)


class Quantized(nn.Linear):
    """Writes what it does not read back, as the layers of bitsandbytes do, and a state that is no tensor."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = torch.ones(1)

    def get_extra_state(self) -> Any:
        return {"scale": 1.0}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"scale": 1.0}


def test_a_kept_worker_goes_back_to_the_first_weights_of_any_module() -> None:
    context = Context(Workload(lambda: nn.Sequential(Quantized(3, 3)), squared, images), is_kept=True)
    context.open("a test")
    model = context.model(torch.device("cpu"))
    first = model[0].weight.detach().clone()  # type: ignore[index] # a module of modules
    with torch.no_grad():
        model[0].weight.zero_()  # type: ignore[index] # as above
    again = context.model(torch.device("cpu"))
    assert again is model
    assert torch.equal(again[0].weight, first)  # type: ignore[index] # as above
    again[0].added = nn.Parameter(torch.ones(1))  # type: ignore[index] # as a job that prunes it does
    assert context.model(torch.device("cpu")) is not model


class Scaled(nn.Linear):
    """With a buffer that its state dict lacks."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("scale", torch.ones(1), persistent=False)


def test_a_kept_worker_goes_back_to_the_first_buffers_too() -> None:
    context = Context(Workload(Scaled, squared, images), is_kept=True)
    context.open("a test")
    model = context.model(torch.device("cpu"))
    model.scale.fill_(math.nan)  # type: ignore[operator] # a buffer
    assert context.model(torch.device("cpu")) is model
    assert float(model.scale) == 1.0  # type: ignore[arg-type] # as above
    model.register_buffer("scale", torch.zeros(4), persistent=False)  # as a cache that grows
    assert context.model(torch.device("cpu")).scale.tolist() == [1.0]  # type: ignore[operator] # as above


# -- a trial -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold_heap", [True, False])
def test_the_heap_is_held_only_where_that_is_asked_for_and_the_rate_is_of_the_mean_step(
    hold_heap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A confirming process starts with the variables, or is meant to run without them."""
    held: list[bool] = []
    timed = Timing(
        first_step_seconds=1.0,
        raw_step_seconds=(*[1.0] * 9, 11.0),  # a long run meets its slow steps too
        num_steps_together=1,
        data_seconds=0.0,
        update_seconds=None,
        num_skips=0,
        last_loss=0.0,
        was_cut=False,
        num_compiling_steps=0,
    )
    monkeypatch.setattr(worker, "hold_heap", lambda: held.append(True))
    monkeypatch.setattr(worker, "time_steps", lambda *_: timed)
    found = Job().run("search", accumulation_steps=2, hold_heap=hold_heap)
    assert isinstance(found, Measurement)
    assert (found.step_seconds, found.samples_per_second) == (2.0, 2.0)
    assert found.step_seconds_interval == (1.0, 2.0), "which holds its own point"
    assert held == [True] * hold_heap


class Job:
    """A workload that notes what is done to it; sample i is as long as i says."""

    def __init__(self, **parts: Any) -> None:
        self.lengths: list[int] = []
        self.phases: list[str] = []
        samples: Any = [torch.ones(length, 4) for length in (1, 1, 1, 50, 1, 70)]
        self.workload = Workload(
            **{
                "model": nn.Sequential(nn.Linear(4, 1), nn.Dropout()),
                "loss": self.loss,
                "data": DataLoader(samples, batch_size=2, collate_fn=nn.utils.rnn.pad_sequence),
                **parts,
            }
        )

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.lengths.append(batch.shape[0])
        return squared(model, batch)

    def run(self, purpose: Any = "confirm", accumulation_steps: int = 1, **fields: Any) -> Outcome:
        spec = Trial(
            candidate=Setting(precision="bf16", batch_size=2, accumulation_steps=accumulation_steps),
            device="cpu",
            purpose=purpose,
            num_warmup_steps=(3, 3),
            num_steps=(2, 2),
            torch_state=torch_state.capture(),
            **({"ending_seconds": 60.0 if purpose == "confirm" else None} | fields),
        )
        return worker.run(Context(self.workload, is_kept=False), spec, self._hear)

    def _hear(self, event: JobEvent) -> None:
        if isinstance(event, Phase):
            self.phases.append(event.name)


def never(*_: Any) -> None:
    raise AssertionError


def test_the_largest_samples_come_first_and_last_and_the_jobs_own_functions_after_them() -> None:
    noted: dict[str, Any] = {}

    def evaluate(model: nn.Module) -> None:
        model.eval()
        noted["dtype"] = model(torch.ones(1, 4)).dtype

    def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        noted["modes"] = [module.training for module in model.modules()]
        noted["folder"] = folder
        torch.save((model.state_dict(), optimizer.state_dict()), folder / "last.pt")

    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(), nn.Identity().eval())
    job = Job(model=model, evaluate=evaluate, checkpoint=checkpoint)
    outcome = job.run(worst_samples=(5,))
    assert isinstance(outcome, Measurement)
    assert [job.lengths[step] for step in (0, 3, 6)] == [70] * 3
    assert sorted(job.lengths[step] for step in (1, 2, 4)) == [1, 50, 70]  # an epoch
    assert len(job.lengths) == 7
    assert noted["dtype"] == torch.bfloat16
    assert noted["modes"] == [True, True, True, False]
    assert not noted["folder"].exists()
    assert None not in (outcome.evaluation_seconds, outcome.checkpoint_seconds)
    assert job.phases[-2:] == ["evaluating", "writing a checkpoint"]


def test_a_trial_of_the_search_takes_the_worst_batch_that_the_workload_names_and_nothing_more() -> None:
    job = Job(worst_batch=lambda size: torch.ones(99, size, 4), evaluate=never, checkpoint=never)
    outcome = job.run("search", worst_samples=(5,))
    assert isinstance(outcome, Measurement)
    assert (job.lengths.count(99), job.lengths[0]) == (2, 99)
    assert (outcome.evaluation_seconds, outcome.ending_seconds) == (None, None)


def test_what_the_jobs_own_functions_raise_is_noted_and_the_measurement_stands() -> None:
    folders: list[Path] = []

    def evaluate(model: nn.Module) -> None:
        sys.exit("no data")

    def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        folders.append(folder)
        (folder / "half.pt").write_text("half")
        raise ValueError("disk of glass")

    outcome = Job(evaluate=evaluate, checkpoint=checkpoint).run()
    assert isinstance(outcome, Measurement)
    assert re.search(r"evaluate .*no data; checkpoint .*disk of glass", outcome.ending_problem or "")
    assert (outcome.evaluation_seconds, outcome.checkpoint_seconds) == (None, None)
    assert outcome.ending_seconds is not None
    assert not folders[0].exists()
    late = Job(evaluate=never).run(ending_seconds=0.0)
    assert isinstance(late, Measurement)
    assert "no time was left" in (late.ending_problem or "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process start its peak memory anew")
@pytest.mark.parametrize("where", ["worst_batch", "evaluate", "checkpoint"])
def test_memory_above_the_limit_is_out_of_memory_wherever_it_was_taken(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_limit_data_segment", lambda limit_bytes: None)  # nothing raises, and the tests go on

    def take(*_: Any) -> Tensor:
        torch.ones(1 << 26)  # 256 MiB
        return torch.ones(1, 2, 4)

    def refuse(*_: Any) -> None:
        raise MemoryError

    limit = 128 << 20
    assert isinstance(Job().run(memory_limit_bytes=limit), Measurement)
    outcomes = [Job(**{where: take}).run(memory_limit_bytes=limit), Job(**{where: refuse}).run()]
    assert [outcome.kind for outcome in outcomes if isinstance(outcome, Failure)] == ["oom", "oom"]


ENDLESS = """
import time
import torch
from torch import nn
from autotune_amp import Workload

def checkpoint(model, optimizer, folder):
    print("folder", folder)
    (folder / "half.pt").write_text("half")
    time.sleep(1000)

def workload():
    loss = lambda model, batch: model(batch).square().mean()
    return Workload(nn.Linear(4, 1), loss, lambda n: torch.ones(n, 4), checkpoint=checkpoint)
"""


def test_an_ending_that_is_too_long_leaves_the_measurement_and_no_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    listener = Listener()
    with LocalBackend(payload, "forked", listener) as runner:
        state = runner.load(60)
        runner.open("cpu", None, 60)
        # No step's deadline holds for it.
        found = runner.submit(
            msgspec.structs.replace(
                SPEC, torch_state=state, purpose="confirm", step_deadline_seconds=0.4, ending_seconds=1.5
            )
        ).result()
    assert isinstance(found, Measurement)
    assert (found.checkpoint_seconds, found.ending_seconds) == (None, 1.5)
    assert "did not end within 1." in (found.ending_problem or "")
    assert not Path(listener.words("folder")[-1]).exists()
