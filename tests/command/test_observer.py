"""What the observer of steps does in a process, called in this one."""

from __future__ import annotations

import sys
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import said
import torch

from autotune_amp.command.agent import observer, passes
from autotune_amp.command.agent.diagnosis import StepDiagnosis
from autotune_amp.command.measure import MIN_NUM_INTERVALS
from autotune_amp.command.messages import Step
from autotune_amp.command.rank_steps import Rank


def test_the_memory_that_is_left_is_told_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert observer._free_memory_share() is None, "a card that was not used"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 30)
    for free, share in ((30, 0.25), (4, 0.1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 40))
        assert observer._free_memory_share() == share
    failed = Mock(side_effect=RuntimeError("CUDA error: device-side assert triggered"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", failed)
    assert observer._free_memory_share() is None


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> observer.Observer:
    """An observer in this process, which forgets it."""
    monkeypatch.setattr("os.register_at_fork", Mock())
    return observer.Observer(Mock())


def test_parameters_that_zero_3_has_emptied_are_counted() -> None:
    parameter: Any = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    parameter.ds_numel = 9
    assert observer._num_by_dtype([parameter]) == {"bfloat16": 9}


def optimizer_on(*devices: str) -> Mock:
    parameters = [
        SimpleNamespace(device=torch.device(device), dtype=torch.float32, numel=lambda: 1) for device in devices
    ]
    return Mock(param_groups=[{"params": parameters}])


def test_memory_is_that_of_every_accelerator_of_a_process(
    observed: observer.Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronized = Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized)
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats",
        lambda device: {
            "allocated_bytes.all.peak": 100 + device.index,
            "reserved_bytes.all.peak": 200 + device.index,
            "num_ooms": 1 + device.index,
        },
    )
    observed.report_step(optimizer_on("cuda:0", "cuda:1", "cpu"))
    (step,) = [call.kwargs for call in observed.channel.add.call_args_list]  # type: ignore[attr-defined]
    assert (step["peak_memory_bytes"], step["reserved_memory_bytes"], step["num_ooms"]) == (101, 201, 3)
    assert {call.args[0].index for call in synchronized.call_args_list} == {0, 1}


@pytest.mark.parametrize(("num_of_epoch", "batch_size"), [(2, 8), (3, 8), (4, 8), (3, 0)])
def test_steps_on_an_accelerator_are_measured_where_evaluations_follow_few_of_them(
    observed: observer.Observer, num_of_epoch: int, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a batch size the loop draws its batches itself, and only the evaluation has a loader."""
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {})
    monkeypatch.setattr(observer, "time", Mock(monotonic=count().__next__, perf_counter=lambda: 0.0))
    optimizer = optimizer_on("cuda:0")
    for number in range(1, 26):
        observed.loaders.num_batches += bool(batch_size)
        observed.loaders.num_samples["0"] = batch_size * number
        observed.report_step(optimizer)
        if number % num_of_epoch == 0:
            observed.loaders.num_samples["1"] = 64 * number
    rank = Rank(1)
    for message in (said.optimizer(1), said.loader(1), said.loader(1, "1", maker="evaluate")):
        rank.add(message)
    for call in observed.channel.add.call_args_list:  # type: ignore[attr-defined]
        rank.add(Step(pid=1, **call.kwargs))
    intervals = list(rank.intervals())
    assert len(intervals) >= MIN_NUM_INTERVALS
    assert {interval.num_samples / interval.num_steps for interval in intervals} == {batch_size}


@pytest.mark.parametrize(("num_steps_of_batch", "num_steps_of_loader"), [(1, 32), (2, 32), (1, 8)])
def test_steps_on_an_accelerator_are_not_waited_for_at_each_batch(
    observed: observer.Observer, num_steps_of_batch: int, num_steps_of_loader: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {})
    optimizer = optimizer_on("cuda:0")
    for number in range(32):
        loader = str(number // num_steps_of_loader)  # one that is made anew in each epoch has another index
        observed.loaders.num_samples[loader] = 8 * (1 + number // num_steps_of_batch)
        observed.report_step(optimizer)
    steps = [call.kwargs for call in observed.channel.add.call_args_list]  # type: ignore[attr-defined]
    settled = [number for number, step in enumerate(steps, 1) if step.get("is_settled")]
    assert settled == [1, 2, 3, *range(observer.NUM_STEPS_PER_SYNC, 33, observer.NUM_STEPS_PER_SYNC)]


def test_a_step_that_is_captured_into_a_graph_is_told_and_not_waited_for(
    observed: observer.Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: pytest.fail("the capture is invalidated"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    observed.device = torch.device("cuda:0")
    optimizer = optimizer_on("cuda:0")
    observed._before_step(optimizer, (), {})
    observed._after_step(optimizer, (), {})
    assert observed.channel.send.call_args.args == ("captured",)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.amp.GradScaler, "step", lambda *_: None)
    observer._hook_scaler(observed)
    torch.amp.GradScaler("cpu").step(optimizer)
    observed.channel.shield.return_value.assert_not_called()  # type: ignore[attr-defined]


def test_a_scaler_s_step_that_is_captured_into_a_graph_is_not_waited_for(
    observed: observer.Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler_class = Mock(step=Mock())
    monkeypatch.setattr(observer, "GradScaler", scaler_class)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    observed.device = torch.device("cuda:0")
    observer._hook_scaler(observed)
    scaler_class.step(Mock(), optimizer_on("cuda:0"))
    observed.channel.shield.return_value.assert_not_called()  # type: ignore[attr-defined]


def test_an_optimizer_on_the_cpu_trains_on_the_device_of_the_model(observed: observer.Observer) -> None:
    """As DeepSpeed's offload has it; the device here is one that every machine has."""
    observed._report_loaded(torch.nn.Linear(8, 1, device="meta").parameters)
    observed.index_of(torch.optim.SGD(torch.nn.Linear(8, 1).parameters()))
    assert observed.device.type == "meta"
    assert observed.channel.send.call_args.kwargs["devices"] == ["meta"]  # type: ignore[attr-defined]


def test_memory_is_known_on_a_mac(observed: observer.Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "open", Mock(side_effect=FileNotFoundError), raising=False)
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("resource.getrusage", lambda _: Mock(ru_maxrss=1000))
    observed.index_of(optimizer_on("cpu"))
    assert observed.memory_fields() == {"peak_memory_bytes": 1000}
    allocated = iter([3000, 2000])
    monkeypatch.setattr("torch.mps.driver_allocated_memory", lambda: next(allocated))
    observed.index_of(optimizer_on("mps"))
    for _ in range(2):
        assert observed.memory_fields() == {"peak_memory_bytes": 3000, "reserved_memory_bytes": 3000}


def test_a_diagnosis_goes_on_where_a_script_makes_its_optimizer_anew(
    observed: observer.Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    diagnosed = Mock()
    monkeypatch.setitem(sys.modules, "autotune_amp.trial.observed_steps", Mock(DiagnosedSteps=diagnosed))
    observed.diagnosis = StepDiagnosis(observed.channel, observed, {"num_warmup_steps": 3})

    def step(parameter: torch.nn.Parameter) -> None:
        observed.report_step(torch.optim.SGD([parameter]))

    weights, other_weights = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    step(other_weights)  # once, with an optimizer that is gone then
    for num_begun in (0, 0, 1):
        step(weights)
        assert diagnosed.call_count == num_begun
    step(weights)
    diagnosed.return_value.resume.assert_called_once_with("after step")


def test_a_diagnosis_tells_optimizers_apart(observed: observer.Observer) -> None:
    """Whose parameters are taken away after the step, as by DeepSpeed, or which share them and step in turn."""
    diagnosis = StepDiagnosis(observed.channel, observed, {"num_warmup_steps": 3})
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    taken = [torch.optim.SGD([each]) for each in weights]
    for each in taken:
        diagnosis.before_step(each, (), {})
        each.param_groups[0]["params"] = []
    assert [diagnosis._first(each) for each in taken] == [0, 1]

    in_turn = torch.optim.SGD(weights), torch.optim.Adam(weights)
    assert [diagnosis._first(each) for each in in_turn] == [2, 3]
    assert diagnosis._first(torch.optim.Adam(weights)) == 4  # as long as the other one is there
    del in_turn
    assert diagnosis._first(torch.optim.Adam(weights)) == 4


def test_a_loss_on_an_accelerator_is_kept_there_until_a_step_is_settled() -> None:
    loss = Mock(device=torch.device("cuda"))
    kept = passes._readable_later(loss)
    assert kept is loss.detach().clone()
    assert not loss.item.called


def test_a_compiled_function_that_calls_a_model_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo  # before modules are watched, as in a script that makes its second model late

    monkeypatch.setattr(torch.nn.Module, "__call__", torch.nn.Module.__call__)  # puts it back
    recorder = passes.PassRecorder(Mock(shield=lambda hook: hook))
    recorder.watch_modules()
    model = torch.nn.Linear(8, 1)
    total = torch.compile(lambda inputs: model(inputs).sum(), backend="eager", fullgraph=True)
    inputs = torch.randn(4, 8)
    torch.testing.assert_close(total(inputs), model(inputs).sum())
    torch.compiler.reset()
    assert len(recorder.pop_record()["forwards"]) == 1, "outside of compiled code they are watched"


def test_modules_that_others_call_are_not_recorded_where_watching_begins_inside_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.nn.Module, "__call__", torch.nn.Module.__call__)  # puts it back
    recorder = passes.PassRecorder(Mock(shield=lambda hook: hook))

    class Outer(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            recorder.watch_modules()  # as where an optimizer is made
            return inner(super().forward(inputs))  # type: ignore[no-any-return]

    inner, outer = torch.nn.Linear(8, 1), Outer(8, 8)
    recorder.watch_modules()
    for _ in range(2):
        outer(torch.randn(4, 8))
    recorder.unwatch_modules()
    inner(torch.randn(4, 8))
    recorder.watch_modules()
    inner(torch.randn(4, 8))
    assert [name for name, *_ in recorder.pop_record()["forwards"]] == ["Outer", "Outer", "Linear"]


@pytest.mark.parametrize(("shares", "num_watched"), [(True, 3), (False, 13)])
def test_modules_are_watched_until_other_parameters_have_been_stepped(
    monkeypatch: pytest.MonkeyPatch, shares: bool, num_watched: int
) -> None:
    monkeypatch.setattr(torch.nn.Module, "__call__", torch.nn.Module.__call__)  # puts them back
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", torch.optim.Optimizer.__init__)
    recorder = passes.PassRecorder(Mock(shield=lambda hook: hook))
    recorder.watch_first_steps()
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    stepped = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = torch.optim.SGD((model if shares else other).parameters(), lr=0.1)  # such as one that wraps the other
    for _ in range(20):
        model(torch.randn(4, 2))
        recorder.count_step(stepped)
    assert len(recorder.pop_record()["forwards"]) == num_watched, kept
