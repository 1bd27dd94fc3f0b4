"""What jobs cost, as far as it was seen, and what of the time that is left each may take."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from scripted_backend import ScriptedSearch, candidate, described, hardware, measured

from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import CONFIRM_SECONDS, CUT_RATIO, MIN_JOB_GAIN, MIN_ROUNDS, Planner
from autotune_amp.search.space import Space
from autotune_amp.search.stages import Stage
from autotune_amp.search.stages.checks import Checks
from autotune_amp.trial.jobs import Trial

FP32, BF16 = candidate("fp32", 32), candidate("bf16", 32)
SPACE = Space(candidates=(FP32, BF16, candidate("bf16", 64)), baseline=FP32)


def searched(
    start_seconds: float = 10.0, budget_seconds: float = 300.0, device: str = "cuda:0", **fields: Any
) -> ScriptedSearch:
    """A search whose processes take so long to start; bf16 is twice as fast."""

    def answer(trial: Trial) -> Outcome:
        return measured(trial, 2000.0 if trial.candidate.precision == "bf16" else 1000.0)

    found = ScriptedSearch(
        SPACE,
        answer,
        budget_seconds,
        device=replace(hardware({"fp32": 1.0, "bf16": 2.0}), device=device),
        description=described(**fields),
    )
    found.set_start({}, start_seconds)
    return found


def test_a_check_is_predicted_from_the_seconds_of_one_rank() -> None:
    one, four = searched(), searched()
    four.backend._answer = lambda trial: replace(measured(trial, 1000.0), samples_per_second=4000.0)
    for search in (one, four):
        search.measure(FP32)
    assert four.planner.check_seconds(four.ledger) == pytest.approx(one.planner.check_seconds(one.ledger))


def test_nothing_is_kept_back_before_the_precisions_were_compared() -> None:
    search = searched()
    planner = search.planner
    assert planner.exploration_seconds(search.ledger) == search.budget.left()
    search.measure(FP32, BF16)
    assert (
        planner.exploration_seconds(search.ledger)
        < planner.seconds_before_confirmation(search.ledger)
        < search.budget.left()
    )


@pytest.mark.parametrize(("device", "starts_per_round"), [("cuda:0", 1), ("cpu", 2)])
def test_the_confirmation_costs_its_rounds_with_their_starts(device: str, starts_per_round: int) -> None:
    search = searched(start_seconds=10.0, device=device)
    search.measure(FP32, BF16)
    seconds = search.planner.confirmation_seconds(search.ledger)
    least = MIN_ROUNDS * (starts_per_round * 10.0 + 2 * CONFIRM_SECONDS)
    assert least < seconds < 1.5 * least


@pytest.mark.parametrize(
    ("loads_together", "budget_seconds", "num_rounds"),
    [(True, 70.0, MIN_ROUNDS), (False, 70.0, 1), (True, 16.0, 0)],
    ids=["all", "one by one", "none"],
)
def test_rounds_whose_processes_load_together_cost_one_start(
    *, loads_together: bool, budget_seconds: float, num_rounds: int
) -> None:
    search = searched(start_seconds=10.0, budget_seconds=budget_seconds)
    search.job_defaults = replace(search.job_defaults, loads_together=loads_together)
    search.measure(FP32, BF16)
    assert search.planner.num_rounds(search.ledger) == num_rounds
    runs = [BF16, FP32] * num_rounds
    foreseen = search.planner.runs_seconds(search.ledger, runs, min(1, num_rounds))
    assert search.planner.confirmation_seconds(search.ledger) == pytest.approx(foreseen)


@pytest.mark.parametrize(
    ("budget_seconds", "num_rounds"), [(300.0, MIN_ROUNDS), (45.0, 1), (20.0, 0)], ids=["all", "one", "none"]
)
def test_where_not_all_rounds_can_be_afforded_there_is_one_or_none(budget_seconds: float, num_rounds: int) -> None:
    search = searched(start_seconds=10.0, budget_seconds=budget_seconds)
    search.measure(FP32, BF16)
    planner = search.planner
    each = planner.runs_seconds(search.ledger, [BF16, FP32], 1)
    assert planner.confirmation_seconds(search.ledger) == pytest.approx(num_rounds * each)
    search.budget.now += 1.0  # what is affordable is not asked again
    assert planner.confirmation_seconds(search.ledger) == pytest.approx(num_rounds * each)


def test_what_runs_of_a_command_have_measured_is_confirmed_already() -> None:
    search = searched(start_seconds=11.0, device="cpu")
    search.job_defaults = replace(search.job_defaults, are_trials_fresh=True)
    search.backend.start_seconds = None
    planner = search.planner
    for setting in (FP32, BF16):
        assert planner.trial(search.ledger, setting, 100.0).round == 0
        search.run(_Once(setting))
    assert planner.trial(search.ledger, FP32, 100.0).round == 1
    assert planner.setup_seconds(search.ledger) == pytest.approx(11.0), "each starts anew"
    rest = Planner(search.job_defaults, search.budget).confirmation_seconds(search.ledger)
    search.job_defaults = replace(search.job_defaults, are_trials_fresh=False)
    search.ledger.records = tuple(replace(r, round=None) for r in search.ledger.records)
    search.ledger._clear_derived_values()
    assert rest == pytest.approx(2 / 3 * search.planner.confirmation_seconds(search.ledger), rel=0.3)


@pytest.mark.parametrize(("budget_seconds", "has_time"), [(300.0, True), (60.0, False)])
def test_a_command_s_winner_is_confirmed_with_recommended_variables_only_where_all_rounds_fit(
    budget_seconds: float, *, has_time: bool
) -> None:
    recommended = {"MALLOC_TRIM_THRESHOLD_": "1"}
    search = searched(start_seconds=11.0, budget_seconds=budget_seconds, device="cpu")
    search.job_defaults = replace(search.job_defaults, are_trials_fresh=True, environment=recommended)
    search.backend.start_seconds = None
    for setting in (FP32, BF16):
        search.run(_Once(setting))
    search.run(Checks())
    assert search.planner.confirming_environment(search.ledger) == (recommended if has_time else {})
    search.ledger.append(replace(search.ledger.records[1], purpose="confirm", round=1, environment=recommended))
    assert search.planner.confirming_environment(search.ledger) == recommended, "as the confirmation began"
    search.job_defaults = replace(search.job_defaults, are_trials_fresh=False)
    search.ledger.records = search.ledger.records[:-1]
    search.ledger._clear_derived_values()
    assert search.planner.confirming_environment(search.ledger) == recommended, "no trial counts as a confirmation"


@pytest.mark.parametrize(("start_seconds", "is_worth"), [(2.0, True), (25.0, False)])
def test_variables_that_cannot_gain_what_their_runs_cost_are_not_recommended_either(
    start_seconds: float, *, is_worth: bool
) -> None:
    recommended = {"MALLOC_TRIM_THRESHOLD_": "1"}
    search = searched(start_seconds=start_seconds, budget_seconds=600.0, device="cpu")
    search.set_start(recommended, start_seconds)
    search.run(_Once(FP32))
    planner = search.planner
    assert planner.confirming_environment(search.ledger) == (recommended if is_worth else {})
    search.ledger.append(replace(search.ledger.records[0], purpose="confirm", round=0, start_seconds=0.1, seconds=0.2))
    assert planner.confirming_environment(search.ledger) == (recommended if is_worth else {}), "as the stages were told"


class _Once(Stage):
    """A stage of one trial with its limits."""

    def __init__(self, setting: Any) -> None:
        self._left = [setting]

    def next(self, ledger: Any, planner: Planner) -> Trial | None:
        return planner.trial(ledger, self._left.pop(), 100.0) if self._left else None


def test_a_failure_has_ended_the_process_that_was_kept() -> None:
    search = searched(start_seconds=10.0)
    search.backend.start_seconds = 0.0
    search.measure(FP32)
    assert search.planner.waiting_seconds(search.ledger) == 0.0
    search.backend._answer = lambda _: Failure(kind="crash", message="it was killed")
    search.measure(BF16)
    assert search.planner.waiting_seconds(search.ledger) == pytest.approx(10.0)
    assert not search.planner.has_time_for_trial(search.ledger, 9.0)


def test_a_larger_batch_gets_as_much_more_time_for_its_first_step() -> None:
    search = searched()
    search.backend._answer = lambda job: replace(measured(job, 1000.0), first_step_seconds=20.0)
    search.measure(FP32)
    first_step_seconds = []
    for setting in (BF16, candidate("bf16", 64)):
        trial = search.planner.trial(search.ledger, setting, 100.0)
        assert trial.first_step_deadline_seconds is not None
        assert trial.step_deadline_seconds is not None
        first_step_seconds.append(trial.first_step_deadline_seconds - trial.step_deadline_seconds)
    assert first_step_seconds == pytest.approx([60.0, 120.0])


def test_an_emulated_precision_has_time_for_its_start_though_the_baseline_was_measured_as_it_was_described() -> None:
    search = searched()
    search.job_defaults = replace(search.job_defaults, hardware=hardware({"fp32": 1.0, "bf16": 0.01}))
    search.backend._answer = lambda job: replace(measured(job, 1000.0), first_step_seconds=17.0)
    search.measure(FP32)
    (first,) = search.ledger.records
    described_first = Ledger(SPACE, [replace(first, seconds=0.014)])
    deadline_seconds = search.planner.trial(described_first, BF16, 100.0).deadline_seconds
    assert deadline_seconds is not None
    assert 2 * 17.0 <= deadline_seconds < 100.0


def test_an_emulated_precision_that_was_measured_has_as_much_time_as_any_other() -> None:
    search = searched()
    search.job_defaults = replace(search.job_defaults, hardware=hardware({"fp32": 1.0, "bf16": 0.01}))
    search.backend._answer = lambda job: replace(measured(job, 1000.0), first_step_seconds=17.0)
    search.measure(FP32, BF16)
    taken = [replace(record, seconds=20.0) for record in search.ledger.records]
    trial = search.planner.trial(Ledger(SPACE, [*taken, *taken]), candidate("bf16", 64), 100.0)
    assert trial.deadline_seconds == 100.0


def test_a_step_of_one_rank_is_held_against_its_share_of_all_ranks_throughput() -> None:
    cuts = []
    for num_ranks in (1, 2):
        search = searched(num_ranks=num_ranks)
        search.measure(FP32)
        cuts.append(search.planner.trial(search.ledger, BF16, 100.0).cut_step_seconds)
    assert cuts == pytest.approx([CUT_RATIO * 32 / 1000.0, 2 * CUT_RATIO * 32 / 1000.0])


def test_no_more_is_tried_than_the_user_allows_whatever_it_is_for() -> None:
    search = searched()
    search.job_defaults = replace(search.job_defaults, max_trials=2)
    search.measure(FP32)
    assert search.planner.has_time_for_trial(search.ledger, 100.0)
    search.measure(BF16)
    assert not search.planner.has_time_for_trial(search.ledger, 100.0)


def test_a_check_may_take_some_times_what_it_is_foreseen_to_and_half_of_what_is_left() -> None:
    search = searched(budget_seconds=10_000.0)
    search.measure(FP32, BF16)
    check = search.planner.check(search.ledger, "fidelity", BF16)
    assert check.deadline_seconds is not None
    assert check.deadline_seconds < 100.0
    search.budget.now = search.budget.seconds - 20.0
    late = search.planner.check(search.ledger, "fidelity", BF16)
    assert late.deadline_seconds is not None
    assert 10.0 <= late.deadline_seconds <= 20.0


def test_a_check_that_is_late_may_take_half_of_what_is_left_though_the_confirmation_should_have_begun() -> None:
    search = searched(start_seconds=10.0, budget_seconds=300.0)
    search.measure(FP32, BF16)
    planner = search.planner
    assert planner.num_rounds(search.ledger) == MIN_ROUNDS
    search.budget.now = search.budget.seconds - 20.0
    assert planner.seconds_before_confirmation(search.ledger) < 0.0
    assert planner.check(search.ledger, "fidelity", BF16).deadline_seconds == pytest.approx(10.0)


@pytest.mark.parametrize(("start_seconds", "run_seconds"), [(0.0, 9.0), (2.0, 6.0)], ids=["kept", "fresh"])
def test_a_run_in_a_process_that_is_kept_builds_its_model_as_part_of_itself(
    start_seconds: float, run_seconds: float
) -> None:
    search = searched()
    search.measure(FP32)
    (record,) = search.ledger.records
    assert isinstance(record.outcome, Measurement)
    outcome = replace(record.outcome, build_seconds=1.0, context_seconds=0.0)
    confirming = replace(record, purpose="confirm", round=0, seconds=9.0, start_seconds=start_seconds, outcome=outcome)
    search.ledger.append(confirming)
    assert search.planner.run_seconds(search.ledger, FP32) == pytest.approx(run_seconds)


def test_what_is_bought_is_said_before_the_first_trial() -> None:
    search = searched(start_seconds=17.0)
    said = search.planner.forecast(search.ledger, may_fork=False)
    assert "17 s to start" in said
    assert "2 precisions at batch 32" in said
    assert "starts of the command" not in said
    search.job_defaults = replace(search.job_defaults, are_trials_fresh=True)
    search.ledger = Ledger(replace(search.ledger.space, variants={"attn": ("eager", "flash")}), [])
    said = search.planner.forecast(search.ledger, may_fork=False)
    assert "10 starts of the command" in said, "two precisions, two values, a check in two, two further rounds of two"


def test_a_dear_job_has_to_bring_more_and_no_job_is_worth_nothing() -> None:
    planner = searched(start_seconds=10.0).planner
    assert planner.min_gain(0.0) == MIN_JOB_GAIN
    assert MIN_JOB_GAIN < planner.min_gain(20.0) < planner.min_gain(40.0) < 0.05


def test_no_more_than_a_round_is_kept_back_while_what_runs_today_leads() -> None:
    search = searched(start_seconds=30.0)
    search.measure(FP32)
    one_round = search.planner.runs_seconds(search.ledger, [FP32], 1)
    assert search.planner.confirmation_seconds(search.ledger) <= one_round
