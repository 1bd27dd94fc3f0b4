"""Where the data loader sets the speed: which workers are tried, what is recommended, what is said."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from scripted_backend import ScriptedSearch, candidate, described, hardware, measured

from autotune_amp.core.config import AmpConfig, training_arguments
from autotune_amp.core.evidence import Objective
from autotune_amp.core.outcome import Measurement, Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.core.recommendation import Decision
from autotune_amp.integrations.export import ExportSource, export
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.planner import DEADLINE_RATIO
from autotune_amp.search.space import Space, build_space
from autotune_amp.search.stages.checks import Checks
from autotune_amp.search.stages.explore import exploration_stages
from autotune_amp.search.stages.variants import Variants
from autotune_amp.search.stages.workers import LoaderWorkers
from autotune_amp.search.storage.study import Study
from autotune_amp.trial.jobs import Trial

SPACE = Space(
    candidates=tuple(candidate(p, b) for p in ("fp32", "bf16") for b in (8, 16, 32, 64)),
    baseline=candidate("fp32", 32),
)
ALONE: dict[Precision, float] = {"fp32": 100.0, "bf16": 200.0}


class LoadingMachine:
    """Steps alone reach 100 samples/s in fp32 and 200 in bf16 at batch 32 and above, in proportion below.

    Loading comes on top of them without workers, and beside them with `num_workers`, each at `load_rate` samples/s.
    """

    def __init__(self, load_rate: float, num_cpus: int = 2, own: int | None = 0) -> None:
        self.load_rate, self.num_cpus, self.own = load_rate, num_cpus, own
        self.max_useful_workers = 1000
        device = hardware({"fp32": 1.0, "tf32": None, "bf16": 3.0, "fp16": None, "fp8": None})
        identity = msgspec.structs.replace(device.identity, num_cpus=num_cpus)
        self.searched = ScriptedSearch(
            SPACE,
            self.answer,
            device=msgspec.structs.replace(device, identity=identity),
            description=described(num_workers=own),
        )
        self.ledger = self.searched.ledger

    def answer(self, spec: Trial) -> Outcome:
        tried = spec.candidate
        alone = ALONE[tried.precision] * min(tried.batch_size, 32) / 32
        num_workers = (self.own or 0) if tried.num_workers is None else tried.num_workers
        loading = self.load_rate * max(1, min(num_workers, self.max_useful_workers))
        rate = min(alone, loading) if num_workers else 1 / (1 / alone + 1 / loading)
        return measured(spec, rate, data_share=1 - rate / alone)

    def search(self, max_trials: int | None = None) -> Decision:
        with Study.open("sqlite://", "scripted", self.ledger) as study:
            self.searched.job_defaults = msgspec.structs.replace(self.searched.job_defaults, max_trials=max_trials)
            checks = Checks()
            for stage in (*exploration_stages(), checks, LoaderWorkers(checks)):
                self.searched.run(stage)
            study.catch_up(self.ledger, is_over=True)
            told = [trial.user_attrs["candidate"] for trial in study._study.trials]
        assert not any("worker" in name for name in told), "other workers are not in the study's space"
        self.searched.measure_fallbacks()
        assert self.ledger.final_shortlist is not None
        self.searched.confirm(self.ledger.final_shortlist, {}, start_seconds=0.5)
        return self.searched.decide({})

    def tried(self) -> list[tuple[Precision, int]]:
        ours = [r.candidate for r in self.ledger.records if r.purpose == "search"]
        return [(c.precision, c.num_workers) for c in ours if c.num_workers is not None]


def test_workers_are_tried_until_the_wait_is_over_and_recommended() -> None:
    machine = LoadingMachine(load_rate=60.0, num_cpus=16)
    decision = machine.search()
    assert machine.tried() == [("bf16", 1), ("bf16", 2), ("bf16", 4)], "what would be chosen without a wait"
    config, evidence = decision.config, decision.evidence
    assert (config.precision, config.batch_size, config.num_workers) == ("bf16", 32, 4)
    assert evidence.is_confirmed
    assert evidence.samples_per_second == pytest.approx(200.0)
    assert evidence.baseline.config.num_workers is None, "the baseline is what the user runs today"
    assert evidence.speedup == pytest.approx(200.0 / 37.5)
    assert evidence.loader is not None
    assert evidence.loader.data_share == pytest.approx(200 / 260)
    assert [t.num_workers for t in evidence.loader.tried] == [1, 2, 4]
    assert [t.samples_per_second for t in evidence.loader.tried] == pytest.approx([60.0, 120.0, 200.0])
    assert "77 % of a step waited for it, 0 % with 4 workers" in decision.reason
    assert not any("loader" in warning for warning in decision.warnings)
    (plan,) = config.plans
    assert plan.samples_per_second == pytest.approx(100.0), "the plan below was measured with the same workers"
    rows = [(row.precision, row.num_workers) for row in decision.candidates if row.num_workers is not None]
    assert {("fp32", 4), ("bf16", 1), ("bf16", 2), ("bf16", 4)} <= set(rows)
    resumed = LoaderWorkers(Checks()).setting(machine.ledger, machine.searched.job_defaults)
    assert resumed is None, "a resumed search tries none of it again"


def test_where_loading_stays_the_limit_the_precision_with_less_to_go_wrong_wins() -> None:
    machine = LoadingMachine(load_rate=20.0, num_cpus=2)
    decision = machine.search()
    assert machine.tried() == [("bf16", 1), ("bf16", 2), ("fp32", 2)]
    assert (decision.config.precision, decision.config.num_workers) == ("fp32", 2)
    (warning,) = [w for w in decision.warnings if "loader" in w]
    assert "bf16 batch 32 with 2 workers (40.0 samples/s)" in warning
    assert "take less time to load" in warning


@pytest.mark.parametrize("data_share", [0.998, 1.002, 2.0])  # counted in threads that load ahead
def test_waits_that_fill_the_steps_give_speeds_within_reason(data_share: float) -> None:
    machine = LoadingMachine(load_rate=60.0, own=2, num_cpus=4)
    machine.searched.backend._answer = lambda spec: measured(spec, 50.0, data_share=data_share)
    decision = machine.search()
    assert decision.evidence.data_share <= 1
    assert decision.evidence.loader is not None
    assert 50.0 < decision.evidence.loader.step_samples_per_second <= 50.1 * 50.0


def test_workers_that_do_not_help_are_not_recommended() -> None:
    machine = LoadingMachine(load_rate=20.0, num_cpus=16)
    machine.max_useful_workers = 1
    decision = machine.search()
    assert max(num for _, num in machine.tried()) == 2, "two are no faster than one, so four are not tried"
    (warning,) = [w for w in decision.warnings if "loader" in w]
    assert warning.startswith("The data loader sets the speed: ")
    assert "with 1 worker (" in warning


@pytest.mark.parametrize(("objective", "rate"), [("tokens", 1.0), ("speed", 1000.0)])
def test_a_wait_is_long_by_its_seconds_whatever_the_speed_counts(objective: Objective, rate: float) -> None:
    """With samples of 4,096 tokens, or with samples per second of a thousand ranks."""
    machine = LoadingMachine(load_rate=60.0, num_cpus=2)

    def answer(spec: Trial) -> Outcome:
        outcome = machine.answer(spec)
        assert isinstance(outcome, Measurement)
        speed = outcome.samples_per_second
        return msgspec.structs.replace(outcome, samples_per_second=rate * speed, tokens_per_second=4096 * speed)

    machine.ledger.requested_objective, machine.searched.backend._answer = objective, answer
    machine.searched.measure(*(c for c in SPACE.candidates if c.batch_size == 32))
    target = candidate("bf16", 32)
    for num_workers in (1, 2):  # the second although the first gains
        setting = LoaderWorkers(Checks()).setting(machine.ledger, machine.searched.job_defaults)
        assert setting == msgspec.structs.replace(target, num_workers=num_workers)
        machine.searched.measure(setting)


class CrowdedMachine(LoadingMachine):
    """From four workers on, training itself is slowed by them: steps wait for a smaller share of a longer time."""

    def answer(self, spec: Trial) -> Outcome:
        outcome = super().answer(spec)
        if (spec.candidate.num_workers or 0) < 4:
            return outcome
        return measured(spec, 35.0, data_share=0.1)


def test_workers_that_slow_the_training_are_not_doubled_once_more_though_the_wait_is_shorter() -> None:
    machine = CrowdedMachine(load_rate=20.0, num_cpus=16)
    decision = machine.search()
    assert max(number for _, number in machine.tried()) == 4, "40 samples/s with two, 35 with four"
    assert decision.config.num_workers == 2


@pytest.mark.parametrize(
    ("own", "num_cpus", "load_rate", "tried"),
    [(0, 1, 20.0, [1]), (0, 6, 5.0, [1, 2, 4, 6]), (3, 16, 10.0, [6, 12, 16])],
)
def test_their_number_is_doubled_up_to_that_of_the_cpus(
    own: int, num_cpus: int, load_rate: float, tried: list[int]
) -> None:
    machine = LoadingMachine(load_rate, num_cpus, own)
    machine.searched.budget.seconds = 10_000.0
    machine.search()
    assert [number for precision, number in machine.tried() if precision == "bf16"] == tried


@pytest.mark.parametrize(("load_rate", "own"), [(1e6, 0), (2300.0, 0), (60.0, None), (120.0, 2)])
def test_nothing_is_tried_without_a_wait_or_workers_to_change(load_rate: float, own: int | None) -> None:
    machine = LoadingMachine(load_rate, num_cpus=2, own=own)
    decision = machine.search()
    assert machine.tried() == []
    assert decision.config.num_workers is None
    said = [warning for warning in decision.warnings if "The data loader sets the speed" in warning]
    assert len(said) == (own is None)
    assert all("makes its batches itself" in warning for warning in said)


@pytest.mark.parametrize(("own", "longer"), [(0, 0.0), (2, 8.0)])
def test_a_steps_deadline_has_time_for_workers_that_start_anew(own: int, longer: float) -> None:
    machine = LoadingMachine(load_rate=1e6, own=own)
    found = measured(Trial(candidate=SPACE.baseline, device="cpu"), 100.0)
    machine.searched.backend._answer = lambda _: msgspec.structs.replace(found, first_step_seconds=8.0)
    machine.searched.measure(SPACE.baseline)
    spec = machine.searched.planner.trial(machine.ledger, candidate("bf16", 32), 100.0)
    step_deadline = DEADLINE_RATIO * 0.32 + longer
    assert spec.step_deadline_seconds == pytest.approx(step_deadline, rel=1e-3)
    assert spec.first_step_deadline_seconds == pytest.approx(step_deadline + 3 * 8.0, rel=1e-3)


def test_the_number_of_trials_asked_for_is_kept() -> None:
    machine = LoadingMachine(load_rate=60.0, num_cpus=16)
    decision = machine.search(max_trials=3)
    assert len([r for r in machine.ledger.records if r.purpose == "search"]) == 3
    assert machine.tried() == []
    assert any("More than its 0 workers were not tried" in warning for warning in decision.warnings)


class RisingMachine(LoadingMachine):
    """Steps alone are twice as fast at twice the batch, without end."""

    def answer(self, spec: Trial) -> Outcome:
        tried = spec.candidate
        alone = ALONE[tried.precision] * tried.batch_size / 32
        rate = min(alone, self.load_rate * (self.own or 0 if tried.num_workers is None else tried.num_workers))
        return measured(spec, rate, data_share=1 - rate / alone)


def test_where_nothing_waits_any_more_what_the_wait_hid_is_explored_with_those_workers() -> None:
    machine = RisingMachine(load_rate=25.0, num_cpus=4, own=2)
    searched = machine.searched
    searched.measure(
        *(
            msgspec.structs.replace(candidate("fp32", size), num_workers=number)
            for size in (8, 16, 32)
            for number in (None, 4)
        )
    )
    job = LoaderWorkers(Checks()).next(machine.ledger, searched.planner)
    assert isinstance(job, Trial)
    assert (job.candidate.batch_size, job.candidate.num_workers) == (64, 4)
    still = RisingMachine(load_rate=10.0, num_cpus=4, own=2)
    still.searched.measure(
        *(msgspec.structs.replace(candidate("fp32", size), num_workers=n) for size in (16, 32) for n in (None, 4))
    )
    found = LoaderWorkers(Checks()).next(still.ledger, still.searched.planner)
    assert found is None or found.candidate.batch_size <= 32


def test_other_batch_sizes_are_tried_with_the_fewest_workers_that_end_the_wait() -> None:
    machine = LoadingMachine(load_rate=100.0, num_cpus=16)
    today = candidate("bf16", 16)
    machine.searched.measure(SPACE.baseline, today, *(msgspec.structs.replace(today, num_workers=n) for n in (1, 2, 4)))
    planner = machine.searched.planner
    found = LoaderWorkers(Checks())._promising(machine.ledger, planner, planner.budget.left())
    assert found is not None
    assert (found.batch_size > today.batch_size, found.num_workers) == (True, 1)


@pytest.mark.parametrize(
    ("kind", "wait", "own", "expected"),
    [
        ("cuda", 0.2, {"pins_memory": False}, {"num_workers": 2, "pin_memory": True, "prefetch_factor": 4}),
        ("cuda", 0.0, {"pins_memory": False}, {"pin_memory": True}),
        ("cuda", 0.2, {"pins_memory": True, "prefetch_factor": 8}, {}),
        ("cpu", 0.0, {"pins_memory": False}, {}),
    ],
)
def test_pinned_memory_and_prefetched_batches_are_tried_where_they_may_gain(
    kind: str, wait: float, own: dict[str, Any], expected: dict[str, int]
) -> None:
    def answer(spec: Trial) -> Outcome:
        gains = {"pin_memory": 1.2, "prefetch_factor": 1.1}
        rate = 100.0 * math.prod(gains.get(name, 1.0) for name in spec.candidate.loader_arguments)
        return measured(spec, rate, data_share=wait)

    device = hardware({"fp32": 1.0, "tf32": None, "bf16": None, "fp16": None, "fp8": None})
    device = msgspec.structs.replace(device, identity=msgspec.structs.replace(device.identity, type=kind))
    description = described(num_workers=2, **own)
    space = build_space(device, description, SearchOptions())
    search = ScriptedSearch(space, answer, device=device, description=description)
    search.explore()
    search.run(Variants(Checks()))
    shortlist = search.ledger.shortlist
    assert shortlist is not None
    config = AmpConfig.of(shortlist.winner.with_workers_of(2))
    assert config.loader_options == {"batch_size": config.batch_size, **expected}
    if config.loader_arguments:
        options: Any = config.loader_options
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8)), **options)
    assert not config.active_variants, "prepare() leaves them to the loader"
    assert export(ExportSource(config, "cpu"), "torch").text.count("pin_memory=True") == ("pin_memory" in expected)
    arguments = {f"dataloader_{name}": value for name, value in expected.items()}
    assert arguments.items() <= training_arguments(config).items()
