"""A check of fidelity that did not come to an end for a reason that a rule knows says how that is mended, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import check_samples
import msgspec
import pytest
import torch

from autotune_amp.core.outcome import Failure, Record
from autotune_amp.core.setting import Setting
from autotune_amp.precision import rules
from autotune_amp.search.ranking import fidelity_verdicts
from autotune_amp.trial import failures
from autotune_amp.trial.jobs import Check

FP16 = Setting(precision="fp16", batch_size=4)


def failure_of(breaking: Callable[[], Any]) -> Failure:
    try:
        breaking()
    except Exception as error:
        return msgspec.structs.replace(failures.failure_from_exception(error), kind="unsupported")
    raise AssertionError("it did not break")


FACTORISED = failure_of(lambda: check_samples.factorises(torch.eye(16, dtype=torch.float16)))
UNKNOWN = Failure(kind="unsupported", message="RuntimeError: nothing that is known", details="Traceback")


def gate(failure: Failure) -> Any:
    record = Record(search_id="s", number=0, candidate=FP16, purpose="fidelity", outcome=failure, seconds=1.0)
    (found,) = fidelity_verdicts([record]).values()
    return found


def test_the_search_the_check_and_trained_weights_cite_the_rule() -> None:
    check = Check(what="fidelity", candidate=FP16, device="cpu")
    later: Any = msgspec.structs.replace(check, num_steps_before=300).after(FACTORISED, None)
    for found in (gate(FACTORISED), check.unchecked(FACTORISED), later):
        assert rules.LINEAR_ALGEBRA.fix in found.next_step
        assert "check_samples.py:" in found.next_step
        assert "finds other places like it" in found.next_step, "one step does not see all of them"


def test_what_no_rule_knows_is_said_as_before() -> None:
    for verdict in (gate(UNKNOWN), Check(what="fidelity", candidate=FP16, device="cpu").unchecked(UNKNOWN)):
        assert verdict.next_step
        assert "autotune-amp check" not in verdict.next_step


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.",
            rules.BINARY_CROSS_ENTROPY,
        ),
        ("value cannot be converted to type at::Half without overflow", rules.LARGE_CONSTANT),
        ("\"cholesky_cuda\" not implemented for 'Half'", rules.LINEAR_ALGEBRA),
        ("\"linalg_eigh_cuda\" not implemented for 'BFloat16'", rules.LINEAR_ALGEBRA),
        ("mat1 and mat2 must have the same dtype, but got Half and Float", rules.MIXED_OPERANDS),
        ("\"gelu_cpu\" not implemented for 'Half'", rules.HALF_KERNELS),
        ("CUDA out of memory.", None),
        ("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x1)", None),
    ],
)
def test_messages_of_cuda(message: str, rule: rules.Rule | None) -> None:
    assert rules.rule_of(f"RuntimeError: {message}") is rule
