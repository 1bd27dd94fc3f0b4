"""What a calibration says of any loss scale, without a training step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from scripted_backend import calibration, candidate, measurement

from autotune_amp.core.config import LossScale
from autotune_amp.core.outcome import Calibration, Failure, Record
from autotune_amp.core.setting import Setting
from autotune_amp.numerics.scaler_replay import Replay, extend_trace, replay, skipped_steps
from autotune_amp.search import loss_scales
from autotune_amp.search.loss_scales import DEFAULT_PAIR, Scales, best_pair, calibration_results

FP16 = candidate("fp16", 16)
REACHING_DOWN = dict.fromkeys(range(-34, -4), 100)  # a hundredth below 2^-33, a thirtieth below 2^-32 ...


def scales(num_steps: int = 10_000, accumulation_steps: int = 1, **more: Any) -> Scales:
    return Scales(calibration(**more), num_steps, accumulation_steps)


def recorded(outcome: Calibration | Failure, tried: Setting = FP16, number: int = 1) -> Record:
    return Record(search_id="s", number=number, candidate=tried, purpose="calibration", outcome=outcome, seconds=1.0)


def test_the_seeds_are_the_calibrated_scale_and_gradscalers_own() -> None:
    known = scales(log2_scale=14.5)
    assert known.preferred == (2.0**13, 2000)
    assert known.seeds == ((2.0**13, 2000), DEFAULT_PAIR, (2.0**13, 200))
    assert set(known.scored) == set(known.seeds)
    assert scales(log2_scale=17.0).seeds == (DEFAULT_PAIR, (65536.0, 200))


def test_the_choice_is_neither_the_smallest_scale_nor_the_largest_interval() -> None:
    """Skips alone would choose those: they overflow least."""
    known = scales(log2_scale=18.5, histogram={**REACHING_DOWN, -6: 10_000_000})
    for log2_scale in range(-24, 25, 4):
        for interval in (10, 200, 2000, 20_000):
            known.replay((2.0**log2_scale, interval))
    fewest_skips = min(known.scored, key=lambda pair: (known.scored[pair].num_skips, pair[0], -pair[1]))
    assert fewest_skips == (2.0**-24, 20_000)
    assert known.best == known.preferred == (2.0**17, 2000)
    assert known.scored[fewest_skips].applied_share < 0.1
    assert known.scored[known.best].applied_share > 0.99
    assert known.refusal is None


def test_the_course_is_the_replay_stretch_by_stretch() -> None:
    known = scales(num_steps=5000, log2_scale=14.5)
    course, told = known.scale_stretches(DEFAULT_PAIR, is_bounded=True), known.replay(DEFAULT_PAIR)
    skipped = [stretch.skip for stretch in course if stretch.skip is not None]
    assert (len(skipped), course[-1].scale) == (told.num_skips, told.final_scale)
    assert [stretch.first_step for stretch in course] == sorted(stretch.first_step for stretch in course)
    for before, after in pairwise(course):
        grew = before.skip is None
        assert after.scale == before.scale * (2 if grew else 0.5)
        assert after.first_step == (before.first_step + 2000 if grew else (before.skip or 0) + 1)


def test_a_long_training_is_replayed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scales, "MAX_STEPS", 500)
    assert scales(num_steps=10**12).num_steps == 500


def test_a_better_pair_that_was_asked_for_is_chosen() -> None:
    """Its bursts of bad batches leave the scale low for long: a short interval recovers."""
    known = scales(num_steps=1000, log2_scale=18.5, histogram={-41: 100, -6: 900})
    assert known.best == (2.0**17, 200)
    assert known.replay((2.0**17, 50)).applied_share > known.scored[2.0**17, 200].applied_share
    assert known.best == (2.0**17, 50)


def test_fp16_is_refused_with_the_number_where_too_much_flushes_at_every_safe_scale() -> None:
    known = scales(log2_scale=4.2, histogram={-40: 400, -6: 600})
    assert known.refusal is not None
    assert "40.0 % of the gradient's entries underflow to zero at a loss scale of 8" in known.refusal
    assert "2^4.2" in known.refusal
    answers = calibration_results([recorded(calibration(4.2, {-40: 400, -6: 600}))])
    assert loss_scales.refusal(answers, FP16) == known.refusal
    (exclusion,) = loss_scales.exclusions(answers)
    assert (exclusion.precision, exclusion.batch_size, exclusion.reason) == ("fp16", 16, known.refusal)


@pytest.mark.parametrize(("forward_max", "is_refused"), [(16376.0, False), (16377.0, True), (44480.0, True)])
def test_fp16_is_refused_where_activations_come_near_its_end(forward_max: float, is_refused: bool) -> None:
    found = msgspec.structs.replace(calibration(batch_size=512), forward_max=forward_max)
    refusal = Scales(found, 100).refusal
    said = f"activations reach {forward_max:.0f} at batch 512, and fp16 overflows above 65504"
    assert refusal == (said if is_refused else None)


def test_ours_is_replayed_within_its_bounds_and_gradscalers_defaults_without() -> None:
    """Nothing ever overflows before the burst: GradScaler's scale grows beyond 2^24, the controller's stays there."""
    known = scales(log2_scale=200.0)
    short = (65536.0, 20)
    assert known.replay(short).final_scale == 2.0**24
    grown = Scales(calibration(200.0), 40_000)
    assert grown.gradscaler_replay.final_scale > 2.0**24
    assert grown.replay(DEFAULT_PAIR).final_scale <= 2.0**24


def test_a_window_overflows_where_any_of_its_passes_does() -> None:
    """One pass in six holds far larger gradients: of windows of four every second one holds such a pass."""
    noisy = msgspec.structs.replace(calibration(), log2_scales=(14.5, 14.5, 14.5, 14.5, 14.5, 8.0) * 4)
    pair, four = (2.0**15, 50), Scales(noisy, 10_000, accumulation_steps=4)
    of_passes = [s + 2 for s in (14.5, 14.5, 14.5, 14.5, 14.5, 8.0) * 4]
    rule = LossScale(init_scale=pair[0], growth_interval=pair[1])
    windows, single = (
        replay(extend_trace(of_passes, 10_000, num_passes_per_step=k), rule, is_bounded=True) for k in (4, 1)
    )
    assert four.replay(pair)[:2] == windows[:2] != single[:2]


def test_a_window_of_passes_divides_the_loss_and_so_the_scale() -> None:
    """The same gradients at a quarter of the scale: all that is safe or flushed moves by two octaves."""
    one, four = scales(), scales(accumulation_steps=4)
    assert four.preferred == (4 * one.preferred[0], 2000)
    assert four.replay(four.preferred)[:2] == one.scored[one.preferred][:2]
    assert four.flushed_share((2.0**10, 1)) == one.flushed_share((2.0**8, 1))
    assert min(four.finite_log2_scales) == min(one.finite_log2_scales) + 2


def test_what_a_process_should_have_skipped_is_counted_as_the_trial_counts() -> None:
    known = scales(log2_scale=14.5)
    assert known.predicted_num_skips(known.preferred, 400, 3) == 0
    pair = (2.0**14, 5)  # grows to 2^15 after five steps, which is one skip, and so on every six steps
    trace = extend_trace(known.log2_scales, 100)
    assert skipped_steps(trace, LossScale(init_scale=pair[0], growth_interval=5))[:3] == [5, 11, 17]
    assert known.predicted_num_skips(pair, 15, 3) == 3
    assert known.predicted_num_skips(pair, 15, 7) == 2  # the first of the three was in the warm-up
    assert known.predicted_num_skips((2.0**20, 2000), 50, 3) == 0  # it comes down during the warm-up


def test_the_evidence_sets_what_was_seen_beside_what_was_foretold() -> None:
    answers = calibration_results([recorded(calibration())])
    ran = measurement(1.0, raw_step_seconds=(1.0,) * 20, num_steps_together=4, num_skips=2)
    found = loss_scales.evidence(answers, FP16, [ran, ran])
    assert found is not None
    assert (found.num_steps, found.num_confirming_steps, found.num_skips_seen) == (10_000, 160, 4)
    assert (found.num_skips_foretold, found.num_calibrated_steps) == (0, 12)
    assert (found.log2_safe_scale_min, found.log2_safe_scale_median, found.flushed_share) == (14.5, 14.5, 0.0)
    assert found.num_skips <= found.default_num_skips  # 65536 is above 2^14.5: it has to come down first
    assert found.applied_share > found.default_applied_share
    assert loss_scales.evidence({}, FP16, []) is None


@pytest.mark.parametrize(
    ("outcome", "refusal"),
    [
        (calibration(None), "not finite at any loss scale"),
        (Failure(kind="unsupported", message="no LSTM"), "could not be calibrated: unsupported: no LSTM"),
        (Failure(kind="oom", message="it went wrong"), ""),
    ],
)
def test_without_a_safe_scale_fp16_is_refused_and_where_none_was_looked_for_not(
    outcome: Calibration | Failure, refusal: str
) -> None:
    answers = calibration_results([recorded(outcome)])
    found = loss_scales.refusal(answers, FP16) or ""
    assert refusal in found
    assert bool(found) == bool(refusal) == bool(loss_scales.exclusions(answers))
    assert ("oom: it went wrong" in (loss_scales.why_uncalibrated(answers, FP16) or "")) == (not refusal)
    for other in (candidate("fp16", 32), candidate("bf16", 16)):
        assert loss_scales.refusal(answers, other) is None


def test_the_preferred_pair_stays_unless_another_applies_more() -> None:
    def applies(share: float) -> Replay:
        return Replay(0, share, 1.0)

    preferred = (1024.0, 2000)
    assert best_pair({preferred: applies(0.9), (8.0, 100): applies(0.9004)}, preferred) == preferred
    assert best_pair({preferred: applies(0.9), (8.0, 100): applies(0.9006)}, preferred) == (8.0, 100)
    ties = {pair: applies(0.95) for pair in [(8.0, 100), (4.0, 100), (4.0, 200), (16.0, 400)]}
    assert best_pair({preferred: applies(0.9), **ties}, preferred) == (4.0, 200)
    with pytest.raises(KeyError):
        best_pair(ties, preferred)
