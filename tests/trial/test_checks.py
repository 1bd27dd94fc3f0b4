"""Checks in real child processes: what they find, what the workload does to them, and what they leave behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from listening import Listener
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.job import JobEvent, PartialResult
from autotune_amp.core.outcome import Calibration, CheckOutcome, CountedFlops, Failure, Fidelity, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.hardware import host
from autotune_amp.precision import torch_state
from autotune_amp.processes.local import Isolation, LocalBackend, Payload
from autotune_amp.processes.process import Watcher
from autotune_amp.trial import checks
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Check, Trial

pytestmark = pytest.mark.usefixtures("forked_processes")

WORKLOAD = """
import os, pathlib, time
import torch
from torch import nn
from autotune_amp import Workload

def mode():
    return pathlib.Path(__file__).with_name("mode").read_text()

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))

def loss(model, batch):
    x, y = batch.pop("x"), batch.pop("y")  # as many do: the next pass needs them again
    is_low = torch.is_autocast_enabled("cpu")
    MODE = mode()
    if MODE == "oom" or (MODE == "oom above 4" and len(x) > 4):
        raise torch.OutOfMemoryError(f"{len(x)} samples are too many")
    if MODE == "crash" and is_low:
        os._exit(7)
    if MODE == "hang" and is_low:
        time.sleep(1000)
    if MODE == "wrong" or (MODE == "wrong in low" and is_low):
        raise ValueError("no good")
    if MODE == "detached":
        return model(x).mean().detach()
    print("dtype", model[0](x).dtype)
    found = (model(x) - y).square().mean()
    has_learned = found < 0.3
    if MODE == "raises once learned" and is_low and has_learned:
        raise FloatingPointError("log of 0")
    if MODE == "diverges" and not is_low and has_learned:
        return found * float("inf")
    return found * float("nan") if MODE == "nan once learned" and is_low and has_learned else found

def data(size):
    generator = torch.Generator().manual_seed(size)
    def batches():
        while True:
            x = torch.randn(size, 8, generator=generator)
            yield {"x": x, "y": x[:, :1] + 0.1 * torch.randn(size, 1, generator=generator)}
    return batches()

def workload():
    return Workload(model, loss, data, lambda p: torch.optim.AdamW(p, lr=0.01))
"""


class Folder:
    """A workload in a folder, with one template for all checks; `mode` is how it is to misbehave."""

    def __init__(self, path: Path) -> None:
        self._path = path
        (path / "train.py").write_text(WORKLOAD)
        self.set_mode("")
        self.runner, self.state = self.opened("forked", Watcher())

    def set_mode(self, mode: str) -> None:
        (self._path / "mode").write_text(mode)

    def opened(self, isolation: Isolation, watcher: Watcher) -> tuple[LocalBackend, dict[str, Any]]:
        runner = LocalBackend(Payload(target="train:workload", path=(str(self._path), *sys.path)), isolation, watcher)
        runner.load(60)
        return runner, runner.open("cpu", 1, 60)[0]

    def check(self, mode: str = "", **fields: Any) -> CheckOutcome:
        self.set_mode(mode)
        return self.runner.submit(spec(self.state, **fields)).result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    made = Folder(tmp_path_factory.mktemp("checks"))
    with made.runner:
        yield made


def spec(state: dict[str, Any], **fields: Any) -> Check:
    names = set(fields) & set(Setting.__struct_fields__)
    candidate = Setting(**{"precision": "bf16", "batch_size": 8, **{name: fields.pop(name) for name in names}})
    return Check(**{"what": "fidelity", "candidate": candidate, "device": "cpu", "torch_state": state, **fields})


def trial(state: dict[str, Any], **fields: Any) -> Trial:
    candidate = Setting(**{"precision": "fp32", "batch_size": 8, **fields})
    return Trial(candidate=candidate, device="cpu", torch_state=state, num_warmup_steps=(3, 3), num_steps=(4, 4))


def test_a_healthy_model_is_faithful_also_where_its_loss_takes_its_batch_apart(folder: Folder) -> None:
    found = folder.check(pinned_modules=("0", "4"))
    assert isinstance(found, Fidelity)
    assert (found.verdict, found.precision, found.batch_size) == ("faithful", "bf16", 8)
    assert found.pinned_modules == ("0", "4")
    assert found.num_passes > 0
    # 8 samples through the first layer twice and back to its weights, and through the last one and back to both.
    assert found.counted_flops == CountedFlops(flops=2 * 8 * (3 * 8 * 16 + 3 * 16), num_samples=8)


def test_weights_are_trained_before_they_are_looked_at(folder: Folder) -> None:
    first, trained = (folder.check("nan once learned", num_steps_before=num_steps) for num_steps in (0, 300))
    assert isinstance(first, Fidelity)
    assert isinstance(trained, Fidelity)
    assert (first.verdict, first.num_steps_before) == ("faithful", 0)
    assert (trained.verdict, trained.num_steps_before) == ("unfaithful", 300)
    assert "300" in trained.reason
    healthy = folder.check(num_steps_before=50)
    assert isinstance(healthy, Fidelity)
    assert (healthy.verdict, healthy.num_steps_before) == ("faithful", 50)
    assert healthy.counted_flops is None, "those of the first weights were counted"


def test_what_raises_on_trained_weights_alone_is_unfaithful(folder: Folder) -> None:
    found = folder.check("raises once learned", num_steps_before=300)
    assert isinstance(found, Fidelity)
    assert (found.verdict, found.num_steps_before) == ("unfaithful", 300)
    assert "log of 0" in found.reason


def test_the_steps_are_those_that_fp32_took(folder: Folder) -> None:
    found = folder.check("diverges", num_steps_before=300)
    assert isinstance(found, Fidelity)
    assert 0 < found.num_steps_before < 300, found.reason
    failed = folder.check("wrong", num_steps_before=300)
    assert isinstance(failed, Fidelity)
    assert (failed.verdict, failed.num_steps_before) == ("unchecked", 300)
    assert "no good" in failed.reason


def test_a_variant_is_looked_at_on_the_same_trained_weights(folder: Folder) -> None:
    found = folder.check("nan once learned", num_steps_before=300, optimizer_impl="foreach")
    assert isinstance(found, Fidelity)
    assert (found.verdict, found.num_steps_before) == ("unfaithful", 300)


def test_where_memory_is_short_a_smaller_batch_is_checked_and_what_never_fits_is_unchecked(folder: Folder) -> None:
    found = folder.check("oom above 4", batch_size=16)
    assert isinstance(found, Fidelity)
    assert (found.verdict, found.batch_size) == ("faithful", 4)
    found = folder.check("oom", batch_size=3, pinned_modules=("0",))
    assert isinstance(found, Fidelity)
    assert (found.verdict, found.batch_size, found.pinned_modules) == ("unchecked", 1, ("0",))
    assert "1 samples are too many" in found.reason
    assert "memory" in found.next_step
    failed = folder.check("oom", what="calibration", precision="fp16", batch_size=2)
    assert isinstance(failed, Failure)
    assert failed.kind == "oom"


def test_a_calibration_arrives_whole(folder: Folder) -> None:
    found = folder.check(what="calibration", precision="fp16", batch_size=4)
    assert isinstance(found, Calibration)
    assert found.batch_size == 4
    assert len(found.log2_scales) == 12
    assert found.init_scale is not None


@pytest.mark.parametrize(
    ("mode", "fields", "kind", "message"),
    [
        ("crash", {}, "crash", "checking bf16 against fp32"),
        ("hang", {"deadline_seconds": 3.0}, "timeout", "checking bf16 against fp32"),
        ("wrong", {}, "workload_error", "ValueError: no good"),
        ("wrong in low", {}, "unsupported", "ValueError: no good"),
        ("detached", {}, "workload_error", "without gradient"),
        ("", {"pinned_modules": ("9",)}, "workload_error", "no module named '9'"),
    ],
)
def test_what_goes_wrong_is_told_apart(
    folder: Folder, mode: str, fields: dict[str, Any], kind: str, message: str
) -> None:
    found = folder.check(mode, **fields)
    assert isinstance(found, Failure)
    assert found.kind == kind
    assert message in found.message


def test_a_kept_worker_is_as_a_check_found_it_and_pins_for_one_trial_only(folder: Folder) -> None:
    folder.set_mode("")
    listener = Listener()
    runner, state = folder.opened("kept", listener)
    with runner:
        before = [runner.submit(trial(state)).result() for _ in range(2)]
        assert isinstance(runner.submit(spec(state)).result(), Fidelity)
        after = runner.submit(trial(state)).result()
        # The first trial built the model, which drew from the generator; the others did not.
        assert isinstance(before[1], Measurement)
        assert isinstance(after, Measurement)
        assert after.last_loss == before[1].last_loss
        seen = []
        for pins in ((), ("0",), ()):
            listener.text = ""
            assert isinstance(runner.submit(trial(state, precision="bf16", pinned_modules=pins)).result(), Measurement)
            seen.append(set(listener.words("dtype")))
    assert seen == [{"torch.bfloat16"}, {"torch.float32"}, {"torch.bfloat16"}]


def test_a_bad_verdict_is_told_before_culprits_are_looked_for() -> None:
    """So that it outlives a search for them that takes too long."""

    def overflowing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (model(batch) * 1e6).mean()
        return result

    events: list[JobEvent] = []
    workload = Workload(nn.Linear(8, 1), overflowing, lambda size: torch.ones(size, 8))
    asked = spec(torch_state.capture(), precision="fp16")
    found = checks.check(Context(workload, is_kept=False), asked, events.append)
    assert isinstance(found, Fidelity)
    told = [event.value for event in events if isinstance(event, PartialResult)]
    assert [each.verdict for each in told] == ["unfaithful"] * 2, "before the culprits, and before the count"
    assert told[0].culprits == ()
    assert found.verdict == "unfaithful"
    assert asked.after(Failure(kind="timeout", message="it took too long"), found) is found


@pytest.mark.parametrize(("free_bytes", "is_checked"), [(20_000_000, True), (18_000_000, False)])
def test_what_the_hosts_memory_cannot_hold_is_unchecked(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, *, is_checked: bool
) -> None:
    """A copy of two million weights takes 8.4 MB; errors and sums of the one million that is trained, 10.5 MB more."""
    monkeypatch.setattr(host, "free_memory_bytes", lambda: free_bytes)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).requires_grad_(False)
    model[1].requires_grad_()
    workload = Workload(model, lambda model, x: model(x).square().mean(), lambda size: torch.randn(size, 1024))
    found = checks.check(Context(workload, is_kept=False), spec(torch_state.capture()), lambda event: None)
    assert isinstance(found, Fidelity)
    assert (found.verdict != "unchecked") == is_checked, found.reason


@pytest.mark.parametrize("what", ["fidelity", "calibration", "accumulation"])
def test_a_model_with_lazy_modules_is_checked(what: str) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch).square().mean()
        return result

    workload = Workload(lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1)), loss, lambda n: torch.randn(n, 8))
    found = checks.check(Context(workload, is_kept=False), spec(torch_state.capture(), what=what), lambda event: None)
    assert not isinstance(found, Failure), found
    assert getattr(found, "verdict", "faithful") in ("faithful", "mean")


def test_a_loop_with_lazy_modules_is_unchecked() -> None:
    def step(state: dict[str, Any], batch: torch.Tensor, amp: Any) -> None:
        amp.backward(state["net"](batch).square().mean())
        amp.step(state["optimizer"])
        amp.update()

    def build() -> dict[str, Any]:
        net = nn.LazyBatchNorm1d(affine=False)  # whose buffers alone are lazy
        linear = nn.Linear(8, 1)
        return {"net": nn.Sequential(net, linear), "optimizer": torch.optim.SGD(linear.parameters(), lr=0.1)}

    workload = Workload(build=build, train_step=step, data=lambda n: torch.randn(n, 8))
    found = checks.check(Context(workload, is_kept=False), spec(torch_state.capture(), what="fidelity"), lambda _: None)
    assert isinstance(found, Fidelity), found
    assert found.verdict == "unchecked"
    assert "lazy" in found.reason
