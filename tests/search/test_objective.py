from __future__ import annotations

import pytest
from scripted_backend import fidelity, ledger_of, shortlist
from scripted_backend import measurement as measured
from test_decide import FP16, FP32, HEAP, Log, at, decided

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.evidence import Objective
from autotune_amp.core.outcome import Measurement, Verdict
from autotune_amp.core.setting import Setting
from autotune_amp.search.ranking import Merit, contenders, is_worth_a_change, least_speed, rank, rank_for, tier
from autotune_amp.search.ranking import merit as merit_of
from autotune_amp.search.space import Space
from autotune_amp.search.stages.checks import CheckAction, next_action
from autotune_amp.search.stages.explore import smaller_batch

SMALL, SLOW = at("bf16", 8), at("bf16", 4)
BIG = at("bf16", 64)
FOUND = at("fp32", 32, as_found=True)
MIB = 2**20


def merit(speed: float, mib: float = 100, joules: float | None = None) -> Merit:
    return Merit(speed, int(mib * MIB), joules)


def took(speed: float, mib: float = 100, joules: float | None = None) -> Measurement:
    return measured(speed, int(mib * MIB), joules_per_sample=joules)


@pytest.mark.parametrize(
    ("merits", "ranking"),
    [
        # The least memory of what is no slower than 97 samples/s; then what is slower, by speed.
        ({FP32: merit(100, 200), SMALL: merit(97, 50), SLOW: merit(96, 20)}, [SMALL, FP32, SLOW]),
        ({FP32: merit(50, 90), BIG: merit(96, 80), SMALL: merit(90, 20)}, [BIG, SMALL, FP32]),
        # Peaks within 2 % are alike: then speed decides, and within 3 % of it what has less to go wrong.
        ({BIG: merit(200, 101), SMALL: merit(150, 100)}, [BIG, SMALL]),
        ({BIG: merit(200, 103), SMALL: merit(150, 100)}, [SMALL, BIG]),
        ({BIG: merit(200, 101), FP32: merit(195, 100)}, [FP32, BIG]),
        ({FOUND: merit(200, 10), BIG: merit(100, 100)}, [BIG, FOUND]),
    ],
)
def test_memory(merits: dict[Setting, Merit], ranking: list[Setting]) -> None:
    assert least_speed("memory", merit(100)) == 97
    assert rank_for("memory", merits, baseline=merit(100)) == ranking


@pytest.mark.parametrize(
    ("merits", "ranking"),
    [
        ({FP32: merit(200, joules=2.0), BIG: merit(100, joules=1.0)}, [BIG, FP32]),
        ({FP32: merit(50, joules=1.02), BIG: merit(100, joules=1.0)}, [FP32, BIG]),
        ({FP32: merit(50, joules=1.04), BIG: merit(100, joules=1.0)}, [BIG, FP32]),
        ({FP32: merit(200), BIG: merit(100, joules=5.0), FP16: merit(300)}, [BIG, FP16, FP32]),  # unknown comes last
    ],
)
def test_energy(merits: dict[Setting, Merit], ranking: list[Setting]) -> None:
    assert rank_for("energy", merits) == ranking
    assert rank_for("energy", merits, tiers={ranking[0]: 2})[-1] == ranking[0], "a lower tier comes first"


def test_a_setting_takes_the_largest_of_its_peaks_and_pays_for_the_samples_that_are_lost() -> None:
    processes = [took(100, 200, joules=1.0), took(100, 300, joules=1.0)]
    assert merit_of(processes, applied_share=0.5) == merit(50, 300, joules=2.0)


@pytest.mark.parametrize(
    ("objective", "found", "today", "is_worth_it"),
    [
        ("speed", merit(102.9), merit(100), False),
        ("speed", merit(103.1), merit(100), True),
        ("memory", merit(100, 97.1), merit(100, 100), False),
        ("memory", merit(100, 96.9), merit(100, 100), True),
        ("memory", merit(103, 101), merit(100, 100), True),  # as much, and faster
        ("memory", merit(150, 104), merit(100, 100), False),
        ("memory", merit(96, 10), merit(100, 100), False),  # slower than what there is
        ("energy", merit(50, joules=0.98), merit(100, joules=1.0), False),
        ("energy", merit(50, joules=0.96), merit(100, joules=1.0), True),
        ("energy", merit(50, joules=9.0), merit(100), True),
        ("energy", merit(50), merit(100, joules=1.0), False),
    ],
)
def test_a_change_is_worth_it_from_three_percent_on(
    objective: Objective, found: Merit, today: Merit, is_worth_it: bool
) -> None:
    assert is_worth_a_change(objective, found, today) == is_worth_it


def searched() -> Log:
    """bf16 at 64 is the fastest, at 8 the least, at 4 too slow; fp32 is the baseline."""
    log = Log().add(FP32, took(100, 400, 1.0)).add(BIG, took(300, 500, 0.6))
    return log.add(SMALL, took(110, 200, 0.8)).add(SLOW, took(90, 100, 2.0))


def confirmed(*candidates: Setting, log: Log | None = None) -> Log:
    log = log or searched()
    found = {r.candidate: r.outcome for r in log.records}
    for candidate in candidates:
        outcome = found[candidate]
        assert isinstance(outcome, Measurement)
        log.confirm(candidate, *[outcome] * 3, environment={} if candidate == FP32 else HEAP)
    return log


def test_memory_is_chosen_confirmed_and_said() -> None:
    decision = decided(confirmed(SMALL, BIG, FP32), environment=HEAP, objective="memory")
    assert (decision.config.precision, decision.config.batch_size) == ("bf16", 8)
    assert decision.evidence.is_confirmed
    assert decision.evidence.peak_memory_bytes == 200 * MIB
    for part in ("bf16 batch 8 takes 200 MiB and reaches 110 samples/s, 1.10 times", "400 MiB", "bf16 batch 4"):
        assert part in decision.reason


def test_energy_is_chosen_confirmed_and_said() -> None:
    decision = decided(confirmed(BIG, SMALL, FP32), environment=HEAP, objective="energy")
    assert decision.config.batch_size == 64
    assert decision.evidence.joules_per_sample == 0.6
    assert {r.batch_size: r.joules_per_sample for r in decision.candidates} == {32: 1.0, 64: 0.6, 8: 0.8, 4: 2.0}
    assert decision.reason.startswith("bf16 batch 64 takes 0.6 J a sample and reaches")
    assert any("whole device" in note for note in decision.notes)


def test_the_confirmation_of_another_objective_confirms_nothing() -> None:
    log = confirmed(BIG, SMALL, FP32, log=searched().add(at("bf16", 16), took(105, 150)))
    decision = decided(log, environment=HEAP, objective="memory")
    assert decision.config.batch_size == 16
    assert not decision.evidence.is_confirmed
    assert any(warning.startswith("Unconfirmed") for warning in decision.warnings)
    assert decided(log, environment=HEAP).config.batch_size == 64
    assert decided(log, environment=HEAP).evidence.is_confirmed


def test_a_confirmation_overturns_what_turned_out_slower_than_the_baseline() -> None:
    log = searched().add(at("bf16", 16), took(150, 300)).confirm(SMALL, *[took(80, 200)] * 3, environment=HEAP)
    log.confirm(at("bf16", 16), *[took(150, 300)] * 3, environment=HEAP).confirm(FP32, *[took(100, 400)] * 3)
    assert decided(log, environment=HEAP, objective="memory").config.batch_size == 16
    only = searched().confirm(SMALL, *[took(80, 200)] * 3, environment=HEAP).confirm(FP32, *[took(100, 400)] * 3)
    kept = decided(only, environment=HEAP, objective="memory")
    assert kept.config.precision == "fp32"
    assert kept.reason.startswith("Keep what you have: fp32 batch 32, 400 MiB")
    assert "more to go wrong" not in kept.reason, "that is no reason to pass less memory over"


def test_energy_that_nobody_measured_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="measured the device's energy"):
        decided(Log().add(FP32, 100.0), objective="energy")


@pytest.mark.parametrize(("objective", "winner"), [("speed", BIG), ("memory", SMALL), ("energy", BIG)])
def test_what_may_win_is_what_is_checked_and_confirmed(objective: Objective, winner: Setting) -> None:
    where = Space(candidates=(FP32, SLOW, SMALL, BIG), baseline=FP32)
    log = searched()
    chosen = shortlist(log.records, FP32, None, objective)
    assert chosen is not None
    assert chosen.winner == winner
    todo = next_action(ledger_of(log.records, where, None, objective))
    assert todo is not None
    assert (todo.purpose, todo.setting.precision) == ("fidelity", "bf16")
    log.add(at("bf16", 8), fidelity("bf16"), "fidelity")
    confirming = ledger_of(log.records, where, None, objective).final_shortlist
    assert confirming is not None
    assert confirming.winner == winner


def test_fp16_that_may_win_by_memory_is_calibrated_however_slow() -> None:
    low = at("fp16", 8)
    log = searched().add(low, took(100, 50)).add(at("bf16", 8), fidelity("bf16"), "fidelity")
    where = Space(candidates=(FP32, SMALL, BIG, low), baseline=FP32)
    assert next_action(ledger_of(log.records, where)) is None
    assert next_action(ledger_of(log.records, where, None, "memory")) == CheckAction("calibration", low)


def test_a_search_for_memory_tries_smaller_batches_until_they_are_too_slow() -> None:
    sizes = {b: at("bf16", b) for b in (4, 8, 16, 32, 64)}
    where = Space(candidates=(FP32, *sizes.values()), baseline=FP32)
    log = Log().add(FP32, took(100, 400)).add(sizes[64], took(300, 500)).add(sizes[32], took(200, 300))
    assert smaller_batch(ledger_of(log.records, where, None, "memory")) == sizes[16]
    log.add(sizes[16], took(150, 200))
    assert smaller_batch(ledger_of(log.records, where, None, "memory")) == sizes[8]
    log.add(sizes[8], took(90, 100))
    assert smaller_batch(ledger_of(log.records, where, None, "memory")) is None
    assert smaller_batch(ledger_of([], where, None, "memory")) is None


def test_what_is_as_fast_is_ranked_by_what_can_go_wrong_then_by_size_then_by_workers() -> None:
    safer, smaller = at("fp32", 64), at("bf16", 32)
    few, many = (at("bf16", 64, num_workers=number) for number in (1, 4))
    assert rank({many: 102, few: 102, BIG: 102, smaller: 101, safer: 100}) == [safer, smaller, BIG, few, many]


def test_what_nobody_checked_comes_before_what_was_found_doubtful() -> None:
    verdicts: tuple[Verdict, ...] = ("faithful", "undecided", "unchecked", "doubtful")
    assert [tier(None), *(tier(fidelity("bf16", verdict)) for verdict in verdicts)] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize(("speed", "wins"), [(104, True), (102, False)])
def test_what_is_undecided_gives_way_at_equal_speed_alone(speed: float, wins: bool) -> None:
    undecided, decided = at("fp32", 32), at("bf16", 32)  # at equal speed fp32 would come first
    tiers = {undecided: tier(fidelity("fp32", "undecided")), decided: 0}
    assert rank({undecided: speed, decided: 100}, tiers)[0] == (undecided if wins else decided)
    merits = {c: merit(100) for c in tiers}
    assert set(contenders(merits, tiers, decided)) == set(tiers)
    assert set(contenders(merits, tiers | {undecided: tier(fidelity("fp32", "unchecked"))}, decided)) == {decided}
