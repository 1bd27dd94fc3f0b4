"""The arithmetic of the study of search efficiency, on landscapes made up for it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import others
import ours
import provenance
import pytest
import truth
from landscape import Landscape, forked_grid_seconds
from made_landscape import HEADER, SETUP_SECONDS, START_SECONDS, failed, landscape, process
from replay import ReplayBackend, ReplayBudget
from tables import NEVER, Play, Results, clustered, is_beyond_noise, mean_regret, of_one_code, paired

from autotune_amp.core.setting import Setting
from autotune_amp.search.stages.confirm import MEASURE_SECONDS

FP32 = Setting(precision="fp32", batch_size=16)
BF16 = Setting(precision="bf16", batch_size=16)
SEEDS = range(20)


def by_size(cell: Setting) -> float:
    return {"fp32": 100.0, "bf16": 150.0, "fp16": 1.0}[cell.precision] * cell.batch_size


def repetitions(half: Landscape, cell: Setting) -> set[int]:
    return {p.cell.repetition for p in half.cells[cell]}


def test_no_process_is_in_both_halves() -> None:
    whole = landscape(by_size, num_processes=5)
    dealt = [truth.halves(whole, seed) for seed in SEEDS]
    for searching, scoring in dealt:
        ours_, theirs = (set(map(id, half.processes)) for half in (searching, scoring))
        assert not ours_ & theirs
        assert ours_ | theirs == set(map(id, whole.processes))
        assert len({frozenset(repetitions(searching, cell)) for cell in whole.cells}) == 1  # of the same minutes
    assert {len(repetitions(searching, FP32)) for searching, _ in dealt} == {2, 3}
    assert len({frozenset(repetitions(searching, FP32)) for searching, _ in dealt}) > 5


def test_a_cell_without_a_process_in_a_half_has_all_of_its_own_there() -> None:
    whole = Landscape(HEADER, [*landscape(by_size, num_processes=5).cells[FP32], failed(BF16, "timeout", 5.0)])
    for seed in SEEDS:
        for half in truth.halves(whole, seed):
            assert half.cells[BF16] == whole.cells[BF16]
            assert half.cells[FP32] != whole.cells[FP32]


def test_a_rate_is_the_mean_of_processes_and_0_where_one_failed() -> None:
    whole = Landscape(
        HEADER,
        [process(FP32, (0.1,)), process(FP32, (0.2,), repetition=1), process(BF16, (0.1,)), failed(BF16, "oom", 1.0)],
    )
    assert truth.rates(whole) == {FP32: pytest.approx((160 + 80) / 2), BF16: 0.0}


def test_regret_is_what_the_best_cell_has_more() -> None:
    known = {FP32: 100.0, BF16: 80.0}
    assert truth.regret(FP32, known) == 0.0
    assert truth.regret(BF16, known) == pytest.approx(0.2)
    assert truth.regret(Setting(precision="fp16", batch_size=16), known) == 1.0


def test_the_grids_cost_five_processes_a_cell() -> None:
    whole = Landscape(HEADER, [process(FP32, (0.1,) * 20), failed(BF16, "timeout", 9.0, warmup=(0.5,))])
    forked = SETUP_SECONDS + 0.4 + 2.0
    assert forked_grid_seconds(whole) == pytest.approx(5 * (forked + 9.0))
    fresh = START_SECONDS + 0.4 + MEASURE_SECONDS
    assert truth.grid_seconds(whole) == pytest.approx(5 * (fresh + 9.0), abs=0.6)  # a step more or less


def test_the_cheapest_grid_forks_one_trial_a_cell() -> None:
    whole = landscape(by_size, num_processes=1)
    clock = ReplayBudget()
    meter = others.Meter(ReplayBackend(whole, clock, 0), list(whole.cells))
    *_, last = others.OTHERS["grid, one forked trial a cell"](meter, 0)
    assert last == Setting(precision="bf16", batch_size=64)
    steps = [cell.batch_size / by_size(cell) for cell in whole.cells]
    assert clock.now == pytest.approx(sum(SETUP_SECONDS + (4 + others.NUM_STEPS) * step for step in steps))


def test_a_play_has_the_regret_of_its_last_change() -> None:
    play = Play([(0.0, "fp32 16", 0.5), (10.0, "bf16 16", 0.2), (20.0, "bf16 64", 0.3)], {})
    assert [play.regret_at(seconds) for seconds in (0.0, 9.9, 10.0, 19.9, 20.0, 1e9)] == [0.5, 0.5, 0.2, 0.2, 0.3, 0.3]
    assert mean_regret(play, 10.0) == pytest.approx(0.5)
    assert mean_regret(play, 15.0) == pytest.approx((10 * 0.5 + 5 * 0.2) / 15)


def results(*plays: Play) -> Results:
    return Results("made", 100.0, 30.0, {"ours": list(plays)}, {})


def test_the_goal_is_reached_where_the_mean_stays_below_it() -> None:
    falls = Play([(0.0, "a", 0.5), (10.0, "b", 0.0), (30.0, "c", 0.03), (40.0, "d", 0.0)], {})
    steady = Play([(0.0, "a", 0.5), (20.0, "b", 0.005)], {})
    assert results(falls, steady).seconds_to("ours", 0.02) == 20.0
    assert results(falls).seconds_to("ours", 0.02) == 40.0  # it rose in between
    assert results(falls, steady).seconds_to("ours", 0.002) == NEVER
    assert results(falls, steady).regrets("ours", 15.0) == [0.0, 0.5]
    assert results(falls, steady).at_end("ours") == [0.0, 0.005]


def test_an_error_is_that_of_landscapes_however_many_seeds() -> None:
    groups = [[0.01, 0.03], [0.04, 0.06], [-0.01, 0.01]]
    mean, error = clustered(groups)
    assert mean == pytest.approx(0.07 / 3)
    assert error == pytest.approx(0.0251661 / 3**0.5, rel=1e-5)  # of 0.02, 0.05 and 0.0
    assert clustered([group * 50 for group in groups]) == pytest.approx((mean, error))
    assert not is_beyond_noise(groups)
    assert is_beyond_noise([[0.02], [0.03], [0.025]])
    assert not is_beyond_noise([[0.01], [0.02], [0.04]])  # 2.6 errors, of three landscapes
    assert not is_beyond_noise([[0.0], [0.0], [0.0]])


def test_pairs_go_as_far_as_both() -> None:
    assert paired([0.5, 0.25, 0.75], [0.25, 0.5]) == [0.25, -0.25]


def test_variants_are_held_against_ours_of_the_same_code() -> None:
    every = [Results("a", 1.0, 1.0, {}, {"ours": "new", "no cut": "new", "no plateau": "new"})]
    every.append(every[0]._replace(code={"ours": "new", "no cut": "old", "no plateau": "new"}))
    assert of_one_code(every, ["ours", "no cut", "no plateau", "2 rounds"]) == ["ours", "no plateau"]


def test_results_name_the_code_that_they_were_made_with(tmp_path: Path) -> None:
    for name in ("search/study.py", "search/ledger.py", "core/intervals.py", "trial/jobs.py", "trial/worker.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    made_with = provenance.digest(tmp_path)
    (tmp_path / "trial/worker.py").write_text("what no replay runs")
    assert provenance.digest(tmp_path) == made_with
    for name in ("search/ledger.py", "core/intervals.py", "trial/jobs.py"):
        before = provenance.digest(tmp_path)
        (tmp_path / name).write_text("changed")
        assert provenance.digest(tmp_path) != before
    (tmp_path / "search/study.py").rename(tmp_path / "search/studies.py")
    assert provenance.digest(tmp_path) != made_with
    assert len(provenance.digest()) == len(made_with)


def test_variants_of_other_code_are_outdated() -> None:
    codes = [{"ours": "new", "no cut": "new", "no plateau": "old"}, {"ours": "new", "no cut": "old"}]
    assert provenance.outdated(codes, ["ours"], "new") == []
    assert provenance.outdated(codes, ["ours", "no cut", "no plateau", "2 rounds"], "new") == [
        "no cut",
        "no plateau",
        "2 rounds",
    ]
    assert "was that of every search" in provenance.said([], 4, "new")
    assert "no longer that of these of its searches: no cut; 2 rounds" in provenance.said(
        ["no cut", "2 rounds"], 4, "n"
    )
    assert "no longer that of all of its searches" in provenance.said(["ours", "no cut"], 2, "new")


@pytest.mark.parametrize("variant", ours.VARIANTS)
def test_a_variant_replaces_what_is_there(variant: str) -> None:
    for change in ours.VARIANTS[variant]:
        assert hasattr(change.module, change.name)


def test_without_borrowing_a_dear_confirmation_stays_short() -> None:
    dear = landscape(by_size)
    dear = Landscape(msgspec.structs.replace(HEADER, start_seconds=12.0), dear.processes)
    whole, short = (ours.play_ours(dear, 0, name) for name in ("ours", "does not borrow for the confirmation"))
    spent = [found.facts["seconds"] - found.facts["search_seconds"] for found in (whole, short)]
    assert spent[0] > spent[1] + 12.0
    assert whole.facts["search_seconds"] == short.facts["search_seconds"]
