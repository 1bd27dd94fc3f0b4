"""Hosts on a virtual clock: what their processes cost, and what whole searches on them answer."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from backend_contract import BackendContract, Made
from closed_form import SHAPES, ClosedForm, Shape
from conftest import SharedOnce
from host import (
    CONTEXT_SECONDS,
    FORK_SECONDS,
    HAND_OVER_SECONDS,
    PROBE_SECONDS,
    Host,
    HostBackend,
    HostedForm,
    Processes,
    search_on,
)
from hosts import FACTORS, MAX_OVERRUN, Case, Line, cases, covering, has_all, is_slower, searched, starts_fit
from measured import BY_HAND, CARD, MeasuredShape, measured_shapes
from replay import ReplayBudget

from autotune_amp.core.outcome import Failure, Fidelity, Measurement
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import Isolation
from autotune_amp.search import ranking
from autotune_amp.trial.jobs import Check, Trial

FORM = ClosedForm(next(shape for shape in SHAPES if shape.name == "wall in fp32"), 0.0)
FP32, TOO_LARGE = Setting(precision="fp32", batch_size=32), Setting(precision="fp32", batch_size=1024)
FIDELITY = Check(what="fidelity", candidate=Setting(precision="bf16", batch_size=16), device="cpu")
START, BUILD = 20.0, 8.0


class Played:
    """A host on which jobs of one landscape are run one after the other."""

    def __init__(self, host: Host, isolation: Isolation, form: ClosedForm = FORM) -> None:
        self.budget, self._chance = ReplayBudget(), random.Random(0)
        self.form = HostedForm(form, host)
        self.processes = Processes(host, self.budget, self._chance)
        self.backend = self.new(isolation)

    def new(self, isolation: Isolation, environment: dict[str, str] | None = None) -> HostBackend:
        return HostBackend(self.form, self.processes, self.budget, self._chance, isolation, environment)

    def run(self, job: Trial | Check, backend: HostBackend | None = None) -> tuple[Any, float | None, float]:
        """Return what a job found, its start seconds and the seconds that it took."""
        before, handle = self.budget.now, (backend or self.backend).submit(job)
        found = handle.result()
        return found, handle.start_seconds, self.budget.now - before


def trial(setting: Setting = FP32, **fields: Any) -> Trial:
    return Trial(candidate=setting, device="cpu", memory_limit_bytes=FORM.shape.limit_bytes, **fields)


def step_seconds(found: Any) -> float:
    """Return the seconds of all steps of a measurement."""
    assert isinstance(found, Measurement), found
    num_warmup_steps = max(3, found.num_unmeasured_steps) - 1  # after the first
    return found.first_step_seconds + (num_warmup_steps + found.num_steps) * found.step_seconds


class TestHostBackend(BackendContract):
    @pytest.fixture(params=["forked", "kept"])
    def made(self, request: pytest.FixtureRequest) -> Made:
        host = Host(START, BUILD, can_fork=request.param == "forked")
        return Made(Played(host, request.param).backend, trial(), trial(TOO_LARGE), "oom", FIDELITY)


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_kept_process_is_paid_once_and_again_after_a_failure() -> None:
    played = Played(Host(START, BUILD, num_cores=2), "kept")
    found, start_seconds, seconds = played.run(trial())
    assert (start_seconds, found.build_seconds) == (START, BUILD)
    assert seconds == pytest.approx(START + BUILD + step_seconds(found))
    found, start_seconds, seconds = played.run(trial())
    assert (start_seconds, found.build_seconds) == (0.0, 0.0)
    assert seconds == pytest.approx(step_seconds(found))
    failed, start_seconds, seconds = played.run(trial(TOO_LARGE))
    assert (failed.kind, start_seconds) == ("oom", 0.0)
    assert seconds < 1
    found, start_seconds, seconds = played.run(trial())
    assert start_seconds == START
    assert seconds == pytest.approx(START + BUILD + step_seconds(found))


def test_the_process_that_was_opened_runs_the_first_job() -> None:
    played = Played(Host(START, BUILD), "kept")
    played.backend.open()
    assert played.budget.now == pytest.approx(START + BUILD + PROBE_SECONDS)
    assert played.run(trial())[1] == 0.0


def test_one_stands_by_loads_beside_the_jobs_and_takes_over() -> None:
    played = Played(Host(START, BUILD, num_cores=16), "kept")
    played.backend.open()
    opened = played.budget.now
    played.run(trial(TOO_LARGE))
    found, start_seconds, seconds = played.run(trial())  # before the other one is ready
    ready = opened + START + BUILD
    assert start_seconds is not None
    assert played.budget.now - step_seconds(found) == pytest.approx(ready + HAND_OVER_SECONDS)
    assert 0 < start_seconds < START + BUILD
    played.budget.now += START + BUILD + 1
    played.run(trial(TOO_LARGE))
    found, start_seconds, seconds = played.run(trial())
    assert start_seconds == HAND_OVER_SECONDS
    assert found.build_seconds == 0
    assert seconds == pytest.approx(HAND_OVER_SECONDS + step_seconds(found))


def test_one_that_stands_by_confirms_but_not_in_another_environment() -> None:
    played = Played(Host(START, BUILD, num_cores=16), "kept")
    played.backend.open()
    played.budget.now += START + BUILD
    other = played.run(trial(), played.new("kept", {"HELD": "1"}))
    assert other[1] == START
    fresh = played.run(trial(), played.new("kept", {}))
    assert fresh[1] == HAND_OVER_SECONDS


def test_a_fork_builds_unless_the_build_is_shared() -> None:
    played = Played(Host(START, BUILD, can_fork=True), "forked")
    found, start_seconds, seconds = played.run(trial())
    assert (start_seconds, found.build_seconds) == (None, BUILD)
    assert seconds == pytest.approx(FORK_SECONDS + BUILD + step_seconds(found))
    before = played.budget.now
    assert played.backend.share_build(trial(), 60.0) is None
    assert played.budget.now - before == BUILD
    found, start_seconds, seconds = played.run(trial())
    assert found.is_build_shared
    assert seconds == pytest.approx(FORK_SECONDS + step_seconds(found))


@pytest.mark.parametrize(("num_cores", "num_starts"), [(1, 2), (2, 1)])
def test_every_run_of_a_command_is_a_start_and_so_are_its_checks(num_cores: int, num_starts: int) -> None:
    """The two runs of a check load together where there is a core for each."""
    played = Played(Host(START, BUILD, is_command=True, num_cores=num_cores), "kept")
    for _ in range(2):
        found, start_seconds, seconds = played.run(trial())
        assert start_seconds is None
        assert found.build_seconds == found.first_step_seconds > START + BUILD
        assert seconds == pytest.approx(step_seconds(found))
    found, _, seconds = played.run(FIDELITY)
    assert isinstance(found, Fidelity)
    assert num_starts * (START + BUILD) < seconds < (num_starts + 1) * (START + BUILD)


def test_runs_of_a_command_that_load_together_cost_one_start() -> None:
    played = Played(Host(START, BUILD, is_command=True, num_cores=2), "kept")
    trials = [trial(round=number) for number in range(3)]
    before = played.budget.now
    played.backend.load_together(trials, 100.0)
    assert played.budget.now - before == START + BUILD
    for spec, is_loaded in zip(trials, (True, True, False), strict=True):
        before = played.budget.now
        found = played.backend.submit(spec).result()
        assert isinstance(found, Measurement)
        assert (played.budget.now - before < START) == is_loaded


def test_a_job_s_clock_starts_when_its_process_is_ready() -> None:
    played = Played(Host(START, BUILD, num_cores=2), "kept")
    found, _, seconds = played.run(trial(deadline_seconds=5.0))
    assert isinstance(found, Measurement)
    assert seconds > START + BUILD


@pytest.mark.parametrize("isolation", ["kept", "forked"])
def test_a_process_that_is_killed_costs_a_part_of_its_job_and_the_next_one_is_started(isolation: Isolation) -> None:
    whole = Played(Host(START, BUILD, num_cores=2), isolation).run(trial())[2]
    played = Played(Host(START, BUILD, num_cores=2, death_share=1.0), isolation)
    for _ in range(2):
        found, start_seconds, seconds = played.run(trial())
        assert isinstance(found, Failure)
        assert found.kind == "crash"
        assert seconds < whole
        assert start_seconds == (START if isolation == "kept" else None)


def test_on_an_accelerator_every_process_starts_it_once() -> None:
    form = ClosedForm(measured_shapes()[0], 0.0)
    played = Played(Host(START, BUILD, num_cores=2), "kept", form)
    setting = Setting(precision="bf16", batch_size=8)
    first, second = (played.run(Trial(candidate=setting, device="cuda"))[2] for _ in range(2))
    assert first - second == pytest.approx(START + BUILD + CONTEXT_SECONDS)


def test_what_was_compiled_is_in_the_compiler_s_cache() -> None:
    form = ClosedForm(measured_shapes()[0], 0.0, with_variants=True)
    played = Played(Host(START, BUILD), "kept", form)
    setting = Setting(precision="bf16", batch_size=8, compile="default")
    first, second = (played.run(Trial(candidate=setting, device="cuda"))[0] for _ in range(2))
    assert second.first_step_seconds < 0.5 * first.first_step_seconds


# -- what was measured by hand -----------------------------------------------------------------------------------------


def test_a_landscape_has_the_steps_that_were_measured_by_hand() -> None:
    shapes = {shape.name.split(",")[0]: shape for shape in measured_shapes()}
    rows = [json.loads(line) for line in BY_HAND.read_text().splitlines()]
    num_compared = 0
    for row in rows:
        is_product = row.get("is_fused") and (row.get("is_channels_last") or row.get("compile_mode"))
        is_ours = row["kind"] == "outcome" and row["device"] == CARD
        if not is_ours or is_product or row["is_benchmark"]:
            continue
        shape = shapes[row["training"]]
        setting = Setting(
            precision=row["precision"],
            batch_size=row["batch_size"],
            as_found=row["precision"] == "fp32",
            memory_format="channels_last" if row["is_channels_last"] else "contiguous",
            optimizer_impl="fused" if row["is_fused"] else "as_found",
            compile=row["compile_mode"] or "off",
        )
        # Where four times the batch took no longer, or more than four times as long, no line goes through both.
        assert shape.step_seconds(setting) == pytest.approx(row["step_ms"] / 1000, rel=0.05), row["setting"]
        num_compared += 1
    assert num_compared > 80


def test_strict_fp32_is_slower_where_there_are_convolutions() -> None:
    for shape in measured_shapes():
        assert isinstance(shape, MeasuredShape)
        found, strict = (
            shape.step_seconds(Setting(precision="fp32", batch_size=shape.todays_batch_size, as_found=as_found))
            for as_found in (True, False)
        )
        assert (strict > 2 * found) == ("memory_format" in shape.variants)


# -- whole searches ----------------------------------------------------------------------------------------------------


def test_the_searches_cover_every_pair_of_levels() -> None:
    chosen = list(covering(FACTORS, random.Random(0)))
    for one, other in itertools.combinations(FACTORS, 2):
        pairs = {(levels[one], levels[other]) for levels in chosen}
        assert len(pairs) == len(FACTORS[one]) * len(FACTORS[other])
    assert len(chosen) < 24


@pytest.fixture
def lines(shared_once: SharedOnce) -> list[Line]:
    """Return a fourth of the study's searches, on every landscape."""
    found = shared_once("hosts", lambda _: [searched(case) for case in itertools.islice(cases(), 0, None, 4)])
    assert len({line["landscape"] for line in found}) > 40
    return found


@pytest.mark.slow
def test_no_answer_is_slower_than_the_measured_baseline(lines: list[Line]) -> None:
    assert [line for line in lines if is_slower(line)] == []


@pytest.mark.slow
def test_every_legal_precision_is_compared_where_three_starts_fit(lines: list[Line]) -> None:
    assert [line for line in lines if starts_fit(line) and not has_all(line)] == []


@pytest.mark.slow
def test_a_given_budget_is_kept(lines: list[Line]) -> None:
    given = [line for line in lines if line["budget"] is not None and line["seconds"] is not None]
    assert [line for line in given if line["seconds"] > (1 + MAX_OVERRUN) * line["budget"]] == []


@pytest.mark.slow
def test_with_the_default_budget_nearly_every_answer_is_confirmed(lines: list[Line]) -> None:
    """Where a process takes a minute, or every run of a command half of one, ten minutes do not hold a search."""
    limits = {"command": 5.0, "forked": 20.0, "kept": 20.0}
    defaults = [line for line in lines if line["budget"] is None and line["start"] <= limits[line["processes"]]]
    assert len(defaults) > 20
    unconfirmed = [line for line in defaults if not line["confirmed"]]
    assert len(unconfirmed) <= 0.05 * len(defaults), unconfirmed


def test_a_search_that_cannot_load_the_workload_in_its_budget_has_no_answer() -> None:
    assert search_on(FORM, Host(60.0, 8.0), 0, 60.0) is None


@pytest.mark.parametrize(
    ("name", "host", "budget_seconds", "num_precisions", "most_regret"),
    [
        ("llama, batch kept", Host(10.0, 9.0), None, 4, 0.05),
        ("resnet50, batch free", Host(10.0, 3.0), 150.0, 4, 0.35),  # compiling, which gains a third, has no time
        ("resnet50, batch free", Host(10.0, 3.0), None, 4, 0.05),
        ("gpt, batch kept", Host(11.0, 0.0, is_command=True), 110.0, 4, 0.05),
        (
            "gpt, batch free",
            Host(60.0, 0.0, is_command=True),
            None,
            4,
            0.1,
        ),  # a check costs two trials
    ],
)
def test_trainings_on_a_card_end_where_a_person_would(
    name: str, host: Host, budget_seconds: float | None, num_precisions: int, most_regret: float
) -> None:
    shape = next(shape for shape in measured_shapes() if shape.name == name)
    line = searched(Case(ClosedForm(shape, 0.02, with_variants=True), host, budget_seconds, seed=0))
    assert line["compared"] >= num_precisions
    assert line["regret"] <= most_regret
    assert line["gain"] > 2


# A training on two busy cores: a start of 6 s, steps of about a second.
BUSY_MS = {
    "bf16": {"fp32": 1300, "bf16": 1000, "fp16": 1030},
    "fp32": {"fp32": 1300, "bf16": 1800, "fp16": 2200},
    "fp16": {"fp32": 1300, "bf16": 1100, "fp16": 950},
}


@pytest.mark.parametrize("fastest", list(BUSY_MS))
@pytest.mark.parametrize(("is_command", "most_seconds"), [(True, 220), (False, 350)])
def test_a_search_on_a_busy_cpu_is_soon_over(fastest: Precision, is_command: bool, most_seconds: float) -> None:
    def pass_seconds(precision: Precision, batch_size: int) -> float:
        return 0.02 + BUSY_MS[fastest][precision] / 1000 * batch_size / 32

    shape = Shape(
        "busy",
        pass_seconds,
        matmul_rates={"fp32": 1.0, "bf16": 1.3, "fp16": 1.2},
        effective_batch_size=32,
        sizes=None,
        update_seconds=0.03,
    )
    host = Host(5.5, 0.5, can_fork=True, num_cores=2, is_command=is_command)
    line = searched(Case(ClosedForm(shape, 0.02, with_variants=not is_command), host, None, seed=0))
    assert line["compared"] == line["precisions"] == 3
    assert line["confirmed"]
    assert line["regret"] <= ranking.PLATEAU
    assert line["seconds"] < most_seconds  # on the virtual clock


@pytest.mark.parametrize(
    ("num_cores", "budget_seconds", "runs"),
    [
        (1, 75.0, ["fp32", "bf16", "check", "bf16"]),
        (1, 85.0, ["fp32", "bf16", "check", "fp32", "bf16"]),
        (1, 110.0, ["fp32", "bf16", "check", "fp32", "bf16", "bf16", "fp32"]),
        (1, None, ["fp32", "bf16", "check", "fp32", "bf16", "bf16", "fp32"]),
        (16, 75.0, ["fp32", "bf16", "check", "fp32", "bf16", "bf16", "fp32"]),
    ],
)
def test_what_a_command_is_run_as_with_eleven_seconds_a_start(
    num_cores: int, budget_seconds: float | None, runs: list[str]
) -> None:
    """What described it are the first two. With a core for each, the last four load together."""
    shape = Shape(
        "gpt, 32 ms a step",
        lambda precision, size: 0.002 + (0.030 if precision == "fp32" else 0.010) * size / 8,
        matmul_rates={"fp32": 1.0, "bf16": 3.0},
        effective_batch_size=8,
        todays_batch_size=8,
        sizes=None,
        device="cuda",
        update_seconds=0.001,
    )
    found = search_on(
        ClosedForm(shape, 0.0), Host(11.0, 0.0, is_command=True, num_cores=num_cores), 0, budget_seconds or 600.0
    )
    assert found is not None
    made = ["check" if r.purpose == "fidelity" else r.candidate.precision for _, r in found.records]
    assert made == runs
    assert found.decision is not None
    assert found.decision.config.precision == "bf16"
    assert found.decision.evidence.is_confirmed == (len(runs) == 7)
    assert found.records[-1][0] <= (budget_seconds or 110.0)
