"""Verdicts on all of the study's own workloads that are sick."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.fidelity import check
from autotune_amp.numerics.locate import OUTSIDE
from autotune_amp.numerics.passes import CheckInputs
from autotune_amp.precision import torch_state
from autotune_amp.trial import data
from autotune_amp.trial.context import make_model, make_optimizer

pytestmark = pytest.mark.slow

STUDY = Path(__file__).parents[2] / "studies" / "fidelity"
SICK = (
    *("t5_feed_forward", "gated_feed_forward", "growing_logits", "squaring_norm", "vanishing_eps", "log_of_tiny"),
    *("summed_loss", "quiet_branch", "tiny_cosine", "fully_masked_rows", "running_sum", "large_offset", "calendar"),
    *("variance_of_moments", "one_minus_probability", "bf16_weights", "fp16_weights"),
)
LOW: tuple[Precision, ...] = ("bf16", "fp16")


@pytest.fixture(scope="module")
def zoo() -> Iterator[dict[str, Any]]:
    """The cases by name; the study's modules are forgotten again, and threads left as they were.

    What tests have imported under a name of the study's is put aside meanwhile.
    """
    aside = {path.stem: sys.modules.pop(path.stem) for path in STUDY.glob("*.py") if path.stem in sys.modules}
    known, num_threads = set(sys.modules), torch.get_num_threads()
    sys.path.insert(0, str(STUDY))
    torch.set_num_threads(1)
    try:
        yield {case.name: case for case in importlib.import_module("zoo_sick").SICK}
    finally:
        torch.set_num_threads(num_threads)
        sys.path.remove(str(STUDY))
        for name in set(sys.modules) - known:
            if str(STUDY) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        sys.modules.update(aside)


def checked(case: Any, precision: Precision) -> Fidelity:
    torch_state.seed(0)
    workload = case.make()
    model = make_model(workload)
    with closing(data.stream(workload.data, case.batch_size)) as stream:
        batches = list(islice(stream, 8))
    subject = CheckInputs(model, workload.loss, batches, partial(make_optimizer, workload), torch.device("cpu"))
    found = check(subject, precision, batch_size=case.batch_size)
    assert found.num_passes <= (60 if found.verdict == "faithful" else 1000)
    return found


def test_no_sick_workload_of_the_study_is_left_out(zoo: dict[str, Any]) -> None:
    assert zoo.keys() == set(SICK)


@pytest.mark.filterwarnings("ignore")  # what the transformers library has to say is not ours
@pytest.mark.parametrize("name", SICK)
def test_sick_workloads_are_caught_blamed_and_healed(zoo: dict[str, Any], name: str) -> None:
    case = zoo[name]
    for precision in (*LOW, *(("fp32",) if "fp32" in case.sick_in else ())):
        if precision in case.is_unsupported_in:
            continue
        found = checked(case, precision)
        if precision not in case.sick_in:
            assert found.verdict == "faithful", found.reason
            continue
        assert found.verdict in ("doubtful", "unfaithful")
        named = [culprit for culprit in found.culprits if culprit not in ("", OUTSIDE)]
        if case.culprit is None:
            assert not named, found.reason
        else:
            assert named, found.reason
            assert all(re.search(case.culprit, culprit) for culprit in named), found.reason
        assert bool(found.healing_pins) >= case.is_healable, found.reason
