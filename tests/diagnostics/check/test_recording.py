"""What a recorded step shows of small workloads: the rule, the line, the module; and nothing of the healthy ones."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import check_samples
import loop_samples
import pytest
import sick_loop
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune_amp import Workload
from autotune_amp.diagnostics.check.child import report_on
from autotune_amp.diagnostics.check.findings import CheckReport
from autotune_amp.diagnostics.check.recording import StepRecorder
from autotune_amp.precision import rules
from autotune_amp.precision.rules import AutocastDevice
from autotune_amp.trial.context import make_model

pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type")


def report(workload: Workload, device: AutocastDevice = "cuda") -> CheckReport:
    found = report_on(workload, make_model(workload), device, 8)
    assert found.problem is None
    return found


def marked_line(name: str) -> int:
    """The line below the sample's own that is marked."""
    lines, first = inspect.getsourcelines(getattr(check_samples, name))
    return first + next(number for number, line in enumerate(lines) if "# sick: " in line)


@pytest.mark.parametrize("name", check_samples.SAMPLES)
def test_a_sick_sample_is_found_in_its_line(name: str) -> None:
    rule, make = check_samples.SAMPLES[name]
    (finding,) = report(make()).findings
    assert (finding.rule, finding.line) == (rule, marked_line(name))
    assert Path(finding.file or "").samefile(check_samples.__file__)
    assert f"# sick: {rule}" in finding.code
    assert finding.mend


@pytest.mark.parametrize("name", check_samples.HEALTHY)
@pytest.mark.parametrize("device", rules.AUTOCAST_DEVICES)
def test_nothing_is_found_in_a_healthy_sample(name: str, device: AutocastDevice) -> None:
    assert report(check_samples.HEALTHY[name](), device).findings == ()


@pytest.mark.parametrize(("width", "precisions"), [(100, ("fp16", "bf16")), (72, ("fp8",)), (128, None), (10, None)])
def test_sizes_of_large_products(width: int, precisions: tuple[str, ...] | None) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.Linear(64, width))

    findings = report(Workload(model, check_samples.squares, lambda n: torch.randn(n, 16))).findings
    assert [(f.rule, f.precisions, f.modules) for f in findings] == (
        [] if precisions is None else [("sizes", precisions, ("1",))]
    )


def test_a_small_size_needs_no_tile_of_fp8() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 72), nn.Linear(72, 8))

    assert report(Workload(model, check_samples.squares, lambda n: torch.randn(n, 16))).findings == ()


def test_every_rule_has_a_sick_sample() -> None:
    elsewhere = {"sizes", *("clipping", "old_interface", "scaler")}  # the last three in test_reading.py
    assert {rule for rule, _ in check_samples.SAMPLES.values()} | elsewhere == {rule.name for rule in rules.RULES}


def test_modules_are_named_as_the_model_has_them_and_those_of_one_line_share_a_finding() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict(
            {
                "first": check_samples.Block(check_samples.masks_far),
                "rest": nn.Sequential(check_samples.Block(check_samples.masks_far)),
            }
        )

    def loss(model: Any, batch: Tensor) -> Tensor:
        return check_samples.squares(model["rest"], model["first"](batch).clamp(min=-1))

    (finding,) = report(Workload(model, loss, lambda n: torch.randn(n, 16))).findings
    assert finding.modules == ("first", "rest.0")


def test_devices_differ() -> None:
    """The CPU's autocast computes binary_cross_entropy and decompositions in fp32; only MPS has no float64."""
    for name in ("on_probabilities", "factorises"):
        assert report(check_samples.SAMPLES[name][1](), "cpu").findings == ()
    precise = check_samples.workload(lambda x: x.double().float())
    assert report(precise).findings == ()
    (finding,) = report(precise, "mps").findings
    assert (finding.rule, finding.severity) == ("manual_cast", "breaks")


def test_a_step_that_names_its_device_is_taken_on_the_cpu() -> None:
    def names_it(x: Tensor) -> Tensor:
        mask = torch.ones(16, device="cuda:0") > x.to(torch.device("cuda"))
        return x.cuda(0, non_blocking=True).masked_fill(mask.to("cuda"), -1e9)

    assert [finding.rule for finding in report(check_samples.workload(names_it)).findings] == ["large_constant"]


class Elsewhere:
    """A batch that only `to` brings to the device of the model."""

    def to(self, device: torch.device) -> Tensor:
        return torch.randn(8, 16, device=device)


def test_a_batch_that_is_made_on_another_device_is_moved_to_the_cpu() -> None:
    made = check_samples.workload(check_samples.masks_far)
    elsewhere = Workload(made.model, made.loss, lambda n: Elsewhere())
    assert [finding.rule for finding in report(elsewhere).findings] == ["large_constant"]


def test_a_transform_may_be_called_with_keywords_alone() -> None:
    (finding,) = report(check_samples.workload(lambda x: torch.fft.rfft(input=x).abs())).findings
    assert (finding.rule, finding.precisions) == ("fft", ("bf16",))


def test_a_step_on_an_accelerator_stays_there() -> None:
    """Here its tensors are on torch's device without data, since no accelerator is there."""
    model, batch = nn.Linear(8, 8, device="meta"), torch.randn(4, 8, device="meta")
    recorder = StepRecorder(model, "cuda")
    with recorder.recording(), recorder.autocast():
        output = model(batch.to(torch.device("meta"))).to(torch.bfloat16)
    assert (output.device.type, output.dtype) == ("meta", torch.float32)
    assert [finding.rule for finding in recorder.findings] == ["manual_cast"]


def test_an_autocast_that_was_made_before() -> None:
    kept = torch.autocast("cpu", dtype=torch.bfloat16)

    def nests(x: Tensor) -> Tensor:
        with kept:
            return x @ check_samples.WEIGHT

    assert [finding.rule for finding in report(check_samples.workload(nests)).findings] == ["nested_autocast"]


def test_torch_and_the_model_are_left_as_they_were() -> None:
    before = torch.autocast.__enter__, torch.autocast.__init__, torch.autograd.Function.apply
    workload = check_samples.SAMPLES["Product"][1]()
    model = make_model(workload)
    report_on(workload, model, "cuda", 8)
    assert before == (torch.autocast.__enter__, torch.autocast.__init__, torch.autograd.Function.apply)
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")
    assert all(type(parameter.grad) is Tensor for parameter in model.parameters())


def test_what_the_step_raises_comes_through() -> None:
    def loss(model: Any, batch: Tensor) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(KeyError):
        report(check_samples.workload(check_samples.identity, loss))


def test_a_step_that_only_the_recording_ends_is_reported_so_far() -> None:
    def sees_the_dtype(x: Tensor) -> Tensor:
        assert x.dtype == torch.float32, "half precision is not for us"
        return x

    workload = check_samples.workload(lambda x: sees_the_dtype(check_samples.masks_far(x)))
    found = report_on(workload, make_model(workload), "cuda", 8)
    assert [finding.rule for finding in found.findings] == ["large_constant"]
    assert "not for us" in (found.problem or "")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("device", rules.AUTOCAST_DEVICES)
def test_a_recurrent_module_where_autocast_is_off_takes_one_dtype(kind: Any, device: AutocastDevice) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.body = nn.Linear(16, 16), kind(16, 16)

        def forward(self, x: Tensor) -> Any:
            x = self.enter(x)
            with torch.autocast(device, enabled=False):
                return self.body(x)[0]  # whose module itself looks at the dtypes

    workload = Workload(Model, check_samples.squares, lambda n: torch.randn(n, 16))
    found = report_on(workload, make_model(workload), device, 2)
    assert [(finding.rule, finding.code[:22]) for finding in found.findings] == [
        ("mixed_operands", "return self.body(x)[0]")
    ]
    assert "does not match" in (found.problem or "")


@pytest.mark.parametrize("name", loop_samples.LOOPS)
def test_nothing_is_found_in_a_healthy_loop(name: str) -> None:
    assert report(loop_samples.LOOPS[name]()).findings == ()


def test_a_loop_of_its_own_that_is_sick() -> None:
    found = {finding.rule: finding for finding in report(sick_loop.workload()).findings}
    assert found.keys() == {"loss", "clipping"}
    assert found["clipping"].mend.startswith("amp.unscale_(state['optimizer'])")
    assert found["loss"].code == "loss = (out * out).mean()"


def test_a_model_whose_source_is_not_there() -> None:
    names: dict[str, Any] = {"nn": nn, "__name__": "made_up"}
    exec("class Made(nn.Linear):\n    def forward(self, x): return super().forward(x).masked_fill(x > 1, -1e9)", names)
    found = report(Workload(names["Made"](8, 8), check_samples.squares, lambda n: torch.randn(n, 8)))
    assert [(finding.rule, finding.code) for finding in found.findings] == [("large_constant", "")]
    assert found.unread == ("made_up.Made",)


def test_a_compiled_model_runs_eagerly() -> None:
    def model() -> Any:
        return torch.compile(check_samples.Net(check_samples.Block(check_samples.masks_far)), backend="eager")

    (finding,) = report(Workload(model, check_samples.squares, lambda n: torch.randn(n, 16))).findings
    assert (finding.rule, finding.modules) == ("large_constant", ("body",))


# -- what a step may do with its tensors, none of which may end the recording ------------------------------------------


def penalised(model: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.float().square().sum()


def attacked(model: Any, x: Tensor) -> Tensor:
    x.requires_grad = True
    (slope,) = torch.autograd.grad(check_samples.squares(model, x), x)
    return check_samples.squares(model, (x + 0.1 * slope.sign()).detach())


def adapted(model: Any, x: Tensor) -> Tensor:
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    loss: Tensor = torch.func.functional_call(model, weights, (x,)).float().square().mean()
    slopes = torch.autograd.grad(loss, list(weights.values()))
    moved = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
    after: Tensor = torch.func.functional_call(model, moved, (x,)).float().square().mean()
    return after + check_samples.squares(model, x)


def copies_itself(model: Any, x: Tensor) -> Tensor:
    teacher = copy.deepcopy(model)
    out: Tensor = model(x) - teacher(x).detach()
    return out.float().square().mean()


def checkpointed(model: Any, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=False)
    return out.float().square().mean()


def checkpointed_by_reentering(model: Any, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    return out.float().square().mean()


@pytest.mark.parametrize(
    "loss", [penalised, attacked, adapted, copies_itself, checkpointed, checkpointed_by_reentering]
)
@pytest.mark.parametrize("device", rules.AUTOCAST_DEVICES)
def test_nothing_is_found_in_a_step_that_differentiates_copies_or_recomputes(loss: Any, device: AutocastDevice) -> None:
    workload = check_samples.workload(check_samples.identity, loss)
    assert report(workload, device).findings == ()
    torch.clear_autocast_cache()  # which the process does at the next autocast: it may hold no tensor of the recording
    assert torch.is_autocast_cache_enabled()


def test_a_transform_of_a_power_of_two_breaks_in_bf16_alone_and_on_a_cpu_not_at_all() -> None:
    workload = check_samples.workload(lambda x: torch.fft.fft(x).abs())
    assert [finding.precisions for finding in report(workload).findings] == [("bf16",)]
    assert [finding.precisions for finding in report(workload, "mps").findings] == [("fp16", "bf16")]
    assert report(workload, "cpu").findings == ()


def test_complex_weights_break_fp16s_scaler_alone() -> None:
    class Spectral(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.mix = nn.Parameter(torch.ones(9, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(super().forward(x).float())
            out: Tensor = torch.fft.irfft(spectrum * self.mix)
            return out

    (finding,) = report(Workload(Spectral, check_samples.squares, lambda n: torch.randn(n, 16))).findings
    assert (finding.rule, finding.precisions, finding.modules) == ("weights", ("fp16",), ("",))


# -- no false alarms ---------------------------------------------------------------------------------------------------


def test_clamping_far_away_breaks_on_the_cpu_alone() -> None:
    workload = check_samples.workload(lambda x: x.clamp(-1e5, 1e5))
    assert report(workload).findings == ()
    assert [finding.rule for finding in report(workload, "cpu").findings] == ["large_constant"]


def test_a_part_that_switches_autocast_off_by_itself_is_left_alone() -> None:
    def off(x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return x.float().masked_fill(x > 1, -1e9).clamp(min=-10.0)

    assert report(check_samples.workload(off)).findings == ()


def test_a_dataset_of_fewer_samples_than_are_usually_recorded() -> None:
    samples = torch.utils.data.TensorDataset(torch.randn(4, 16))
    workload = Workload(lambda: nn.Linear(16, 16), lambda model, batch: check_samples.squares(model, *batch), samples)
    assert report_on(workload, make_model(workload), "cuda").batch_size == 4
