"""The arithmetic of the study of search efficiency, on landscapes made up for it."""

from __future__ import annotations

import ours
import pytest
import truth
from landscape import Landscape
from made_landscape import landscape
from tables import clustered, is_beyond_noise

from autotune_amp.core.setting import Setting

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


def test_regret_is_what_the_best_cell_has_more() -> None:
    known = {FP32: 100.0, BF16: 80.0}
    assert truth.regret(FP32, known) == 0.0
    assert truth.regret(BF16, known) == pytest.approx(0.2)
    assert truth.regret(Setting(precision="fp16", batch_size=16), known) == 1.0


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


@pytest.mark.parametrize("variant", ours.VARIANTS)
def test_a_variant_replaces_what_is_there(variant: str) -> None:
    for change in ours.VARIANTS[variant]:
        assert hasattr(change.module, change.name)
