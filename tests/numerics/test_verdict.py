"""The verdict: monotone in every number, "unchecked" only where fp32 itself fails, a reason and a next step always."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp.core.config import Precision
from autotune_amp.core.fidelity import GradientDamage, Verdict
from autotune_amp.numerics.grading import Findings, grade, next_step

ORDER: tuple[Verdict, ...] = ("faithful", "doubtful", "unfaithful")


def damage(noise_ratio: float = 0.0, flushed_share: float = 0.0) -> GradientDamage:
    return GradientDamage(
        name="body.weight", noise_ratio=noise_ratio, cosine=1.0, norm_ratio=1.0, flushed_share=flushed_share
    )


def badness(found: Findings, **changes: Any) -> int:
    return ORDER.index(grade(found._replace(**changes)).verdict)


def maybe(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[float | None]:
    return st.none() | numbers


RATIOS = st.floats(0, 1e3) | st.just(math.inf)
SHARES = st.floats(0, 1)
FINDINGS = st.builds(
    Findings,
    is_finite=st.booleans(),
    is_reference_finite=st.booleans(),
    has_safe_scale=st.booleans(),
    noise_ratio=maybe(RATIOS),
    flushed_share=maybe(SHARES),
    noisiest=st.none() | st.builds(damage, noise_ratio=RATIOS, flushed_share=SHARES),
    most_flushed=st.none() | st.builds(damage, noise_ratio=RATIOS, flushed_share=SHARES),
    forward_max=maybe(st.floats(0, 1e38)),
    format_max=st.sampled_from([65504.0, 3.4e38]),
    is_training_finite=st.booleans(),
    training_gap=maybe(RATIOS),
    training_noise_gap=maybe(RATIOS),
    lost_share=maybe(SHARES),
)
# Strictly inside or outside of the thresholds: where exactly they lie is the study's business.
FAITHFUL = Findings(
    noise_ratio=0.05,
    flushed_share=0.001,
    noisiest=damage(noise_ratio=0.1),
    most_flushed=damage(flushed_share=0.1),
    forward_max=1000.0,
    format_max=65504.0,
    training_gap=2.0,
    training_noise_gap=0.1,
    lost_share=0.1,
)


def test_two_hints_together_are_a_doubt() -> None:
    """Neither says anything alone; found on a held-out workload (studies/fidelity)."""
    assert grade(FAITHFUL._replace(noise_ratio=0.15)).verdict == "faithful"
    assert grade(FAITHFUL._replace(training_gap=16.0)).verdict == "faithful"
    both = grade(FAITHFUL._replace(noise_ratio=0.15, training_gap=16.0))
    assert both.verdict == "doubtful"
    assert "0.15" in both.reason
    assert "16" in both.reason


def test_small_numbers_are_faithful() -> None:
    assert grade(FAITHFUL).verdict == "faithful"
    assert "small beside what sampling does" in grade(FAITHFUL).reason
    assert grade(Findings()).verdict == "faithful"


@pytest.mark.parametrize(
    ("worse", "verdict", "says"),
    [
        ({"is_finite": False}, "unfaithful", "not finite, where fp32's are"),
        ({"is_finite": False, "has_safe_scale": False}, "unfaithful", "not finite at every loss scale"),
        ({"noise_ratio": 0.25}, "doubtful", "0.25 times the noise between batches"),
        ({"noise_ratio": 7.5}, "unfaithful", "7.5 times the noise between batches"),
        ({"flushed_share": 0.91}, "unfaithful", "91 % of the gradient's entries that count are flushed"),
        ({"most_flushed": damage(flushed_share=0.9)}, "unfaithful", "90 % of the gradient of body.weight"),
        ({"noisiest": damage(noise_ratio=4.0)}, "doubtful", "the gradient of body.weight has 4 times the noise"),
        ({"forward_max": 5e4}, "unfaithful", "activations reach 5e+04, where the format ends at 65504"),
        ({"forward_max": 5e4, "format_max": 3.4e38}, "faithful", ""),
        ({"lost_share": 0.84}, "doubtful", "84 % of the updates round away"),
        ({"is_training_finite": False}, "unfaithful", "within a few training steps it is no longer finite"),
        ({"training_gap": 50.0, "training_noise_gap": 0.7}, "doubtful", "0.7 times the scatter between batches"),
        ({"training_gap": 50.0, "training_noise_gap": 9.0}, "unfaithful", "9 times the scatter between batches"),
        # A chaotic run: as far from fp32 as fp32 is from itself. And one that no batch would notice.
        ({"training_gap": 2.0, "training_noise_gap": 9.0}, "faithful", ""),
        ({"training_gap": 50.0, "training_noise_gap": 0.1}, "faithful", ""),
    ],
)
def test_each_finding_alone(worse: dict[str, Any], verdict: Verdict, says: str) -> None:
    found = grade(FAITHFUL._replace(**worse))
    assert found.verdict == verdict
    assert says in found.reason


def test_the_worst_verdict_wins_and_keeps_only_its_own_reasons() -> None:
    found = grade(FAITHFUL._replace(noise_ratio=0.25, flushed_share=0.5, forward_max=6e4))
    assert found.verdict == "unfaithful"
    assert "flushed" in found.reason
    assert "activations" in found.reason
    assert "noise between batches" not in found.reason


def test_infinite_outputs_are_masks_where_the_gradients_are_finite() -> None:
    assert grade(FAITHFUL._replace(forward_max=math.inf)).verdict == "faithful"


def test_it_is_of_the_weights_only_where_nothing_as_bad_is_not() -> None:
    assert grade(FAITHFUL._replace(lost_share=0.9)).is_of_weights
    assert not grade(FAITHFUL._replace(lost_share=0.9, noise_ratio=0.25)).is_of_weights
    assert not grade(FAITHFUL._replace(lost_share=0.9, noise_ratio=0.5)).is_of_weights


@given(FINDINGS)
def test_unchecked_where_fp32_is_not_finite_and_only_there(found: Findings) -> None:
    assert (grade(found).verdict == "unchecked") == (not found.is_reference_finite)


@given(FINDINGS)
def test_every_reason_is_a_clause(found: Findings) -> None:
    reason = grade(found).reason
    assert reason.strip() == reason != ""
    assert not reason.endswith(".")
    assert "nan" not in reason
    assert "None" not in reason


@given(FINDINGS.filter(lambda found: found.is_reference_finite), st.data())
def test_a_worse_number_never_gives_a_better_verdict(found: Findings, data: st.DataObject) -> None:
    name = data.draw(
        st.sampled_from(
            ["noise_ratio", "flushed_share", "forward_max", "training_gap", "training_noise_gap", "lost_share"]
        )
    )
    before = getattr(found, name) or 0.0
    limit = 1.0 if name.endswith("share") else 1e38
    worse = data.draw(st.floats(before, max(before, limit)))
    assert badness(found, **{name: worse}) >= badness(found, **{name: before})
    # What was not measured is not held against it.
    assert badness(found, **{name: None}) <= badness(found)


@given(FINDINGS.filter(lambda found: found.is_reference_finite), RATIOS, RATIOS, SHARES, SHARES)
def test_a_worse_parameter_never_gives_a_better_verdict(
    found: Findings, noise: float, more_noise: float, flushed: float, more_flushed: float
) -> None:
    (noise, more_noise), (flushed, more_flushed) = sorted((noise, more_noise)), sorted((flushed, more_flushed))
    better = found._replace(noisiest=damage(noise_ratio=noise), most_flushed=damage(flushed_share=flushed))
    worse = found._replace(noisiest=damage(noise_ratio=more_noise), most_flushed=damage(flushed_share=more_flushed))
    assert badness(worse) >= badness(better)
    for name in ("is_finite", "is_training_finite"):
        assert badness(found, **{name: False}) >= badness(found, **{name: True})


@given(
    st.sampled_from(sorted(set(get_args(Precision)) - {"fp8"})),
    st.sampled_from(get_args(Verdict)),
    st.sampled_from([(), ("head",), ("head", "norm")]),
    st.booleans(),
)
def test_there_is_always_something_to_do_next(
    precision: Precision, verdict: Verdict, pins: tuple[str, ...], is_of_weights: bool
) -> None:
    said = next_step(precision, verdict, pins, is_of_weights=is_of_weights)
    assert said[0].isupper()
    assert said.endswith(".")


def test_what_to_do_next() -> None:
    assert next_step("bf16", "faithful", ()) == "Train in bf16."
    assert "fp32" in next_step("bf16", "unchecked", ())
    assert "pinned_modules=['head', 'norm']" in next_step("fp16", "unfaithful", ("head", "norm"))
    assert "model.float()" in next_step("bf16", "doubtful", (), is_of_weights=True)
    assert next_step("fp16", "doubtful", ()) != next_step("fp16", "unfaithful", ())
