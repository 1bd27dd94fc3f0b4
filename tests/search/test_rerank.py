"""A finished search is ranked again from its folder; the search itself is a scripted one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_backend import ScriptedSearch, all_well, described, hardware, measured

from autotune_amp.core.errors import InvalidRequestError, StudyError
from autotune_amp.core.evidence import TrainingCost, job_line
from autotune_amp.core.outcome import Calibration, CheckOutcome, Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.core.recommendation import Fingerprint, Recommendation, SearchSummary
from autotune_amp.core.setting import Setting
from autotune_amp.search.answer.decide import cost_of_training, recommend, rerank, rerank_with_options
from autotune_amp.search.loss_scales import scales_of
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.progress import Progress
from autotune_amp.search.space import build_space
from autotune_amp.search.storage.cache import cached_recommendation
from autotune_amp.search.storage.folder import StudyFolder
from autotune_amp.trial.jobs import Check, Trial

HELD = {"MALLOC_TRIM_THRESHOLD_": "2147483647"}
WORKLOAD = described()
OPTIONS = SearchOptions(
    effective_batch_size="free", batch_size=(8, 128), precisions=("fp32", "bf16", "fp16"), storage="sqlite:///pass@word"
)
RATES: dict[Precision, float] = {"fp32": 100.0, "bf16": 150.0, "fp16": 200.0}
MIB: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 3}


def answer(spec: Trial) -> Outcome:
    """fp16 is the fastest, bf16 the least; throughput rises to a plateau at batch 64."""
    precision, size = spec.candidate.precision, spec.candidate.batch_size
    return measured(spec, RATES[precision] * min(size, 64) / 64, memory=MIB[precision] * size * 2**20)


def check(spec: Check) -> CheckOutcome:
    """Its first steps need a scale so small that a little of the gradient is flushed: one that grows fast is better."""
    found = all_well(spec)
    if isinstance(found, Calibration):
        low_at_first = (3.5,) * 3 + (15.5,) * 9
        histogram = ((-30, 8), (-10, 1000))
        return msgspec.structs.replace(found, log2_scales=low_at_first, gradient_histogram=histogram)
    return found


@pytest.fixture(scope="module", params=[HELD, {}], ids=["recommended variables", "the user's own"])
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recommendation, StudyFolder]:
    """A search for speed, confirmed in that environment and saved."""
    environment = request.param
    folder = tmp_path_factory.mktemp("studies")
    device = hardware({"fp32": 1.0, "tf32": None, "bf16": 2.0, "fp16": 2.0, "fp8": None})
    space = build_space(device, WORKLOAD, OPTIONS)
    ours = ScriptedSearch(space, answer, 300.0, check_answer=check, device=device, folder=folder)
    ours.storage = "sqlite://"  # a commit to a file takes its time
    ours.explore(is_checked=True)
    assert ours.ledger.final_shortlist is not None
    ours.confirm(ours.ledger.final_shortlist, environment)
    study_folder = StudyFolder(str(folder), "scripted")
    found = recommend(
        ours.ledger,
        options=OPTIONS,
        environment=environment,
        hardware=device,
        workload=WORKLOAD,
        search=SearchSummary(
            study="s", num_trials=9, num_failures=0, seconds=1.0, search_id="scripted-1", warnings=("Busy.",)
        ),
        fingerprint=Fingerprint(digest="d", parts={}),
        versions={"torch": "2"},
    )
    study_folder.save(found)
    config = found.config
    scales = scales_of(ours.ledger.scales, Setting(precision="fp16", batch_size=config.batch_size))
    assert scales is not None
    assert config.loss_scale is not None
    assert (config.loss_scale.init_scale, config.loss_scale.growth_interval) not in scales.seeds, "what only TPE found"
    return found, study_folder


def asked(**changes: object) -> SearchOptions:
    return msgspec.structs.replace(OPTIONS, **changes)


def test_ranked_again_with_the_same_options_it_is_the_same(finished: tuple[Recommendation, StudyFolder]) -> None:
    found, folder = finished
    assert rerank(found, OPTIONS, folder).to_json() == found.to_json()
    loaded = Recommendation.load(folder.recommendation_path)
    assert rerank(loaded, OPTIONS, folder).to_json() == found.to_json()
    assert "pass@word" not in found.to_json(), "a storage's"
    there = rerank(loaded, asked(objective="memory", num_steps=100, price_per_hour=2.0), folder)
    assert rerank(there, OPTIONS, folder).to_json() == found.to_json()


def test_ranked_again_for_memory(finished: tuple[Recommendation, StudyFolder]) -> None:
    found, folder = finished
    assert (found.config.precision, found.objective, found.evidence.is_confirmed) == ("fp16", "speed", True)
    again = rerank(found, asked(objective="memory"), folder)
    assert again.objective == "memory"
    assert again.evidence.peak_memory_bytes < found.evidence.peak_memory_bytes
    assert again.options["objective"] == "memory"
    assert not again.evidence.is_confirmed
    assert "MiB and reaches" in again.reason
    assert "Busy." in again.warnings
    assert (again.search, again.hardware, again.fingerprint) == (found.search, found.hardware, found.fingerprint)


def test_ranked_again_within_limits(finished: tuple[Recommendation, StudyFolder]) -> None:
    found, folder = finished
    allowed = rerank(found, OPTIONS, folder, precisions=["bf16"])
    assert allowed.config.precision == "bf16"
    assert allowed.evidence.speedup is None, "the baseline, fp32, is not allowed"
    reason = allowed.evidence.baseline.reason
    assert reason is not None
    assert "fp32" in reason
    limit = 100 * 2**20  # bf16 needs 128 MiB at batch 64, fp16 192
    small = rerank(found, OPTIONS, folder, memory_limit=limit)
    assert small.evidence.peak_memory_bytes <= limit
    assert small.config.batch_size < found.config.batch_size
    assert small.options["memory_limit"] == limit
    assert any("more than the limit" in (row.reason or "") for row in small.candidates)
    assert (
        rerank(found, OPTIONS, folder, precisions=["fp32", "bf16", "fp16"], memory_limit=2**40).config == found.config
    )
    beyond: tuple[dict[str, Any], ...] = ({"precisions": ["fp8"]}, {"precisions": ["tf32"]}, {"memory_limit": 1})
    for limits in beyond:
        with pytest.raises(InvalidRequestError):
            rerank(found, OPTIONS, folder, **limits)


def test_another_length_is_another_horizon_for_the_loss_scale(finished: tuple[Recommendation, StudyFolder]) -> None:
    found, folder = finished
    again = rerank(found, asked(num_samples=64_000, price_per_hour=2.0), folder)
    assert again.evidence.loss_scale is not None
    assert again.evidence.loss_scale.num_steps == 64_000 // 32, "in steps of what is run today"
    assert again.job is not None
    assert again.job.num_samples == 64_000
    assert found.job is None


def test_what_a_training_takes_and_costs(finished: tuple[Recommendation, StudyFolder]) -> None:
    config, speed = finished[0].config, finished[0].evidence.samples_per_second
    todays = finished[0].evidence.baseline.samples_per_second
    assert todays is not None

    def job(**asked: Any) -> TrainingCost:
        found = cost_of_training(config, finished[0].evidence, SearchOptions.from_user(**asked))
        assert found is not None
        return found

    found, effective = job(steps=1000), config.effective_batch_size
    assert (found.num_steps, found.num_samples, found.price) == (1000, 1000 * effective, None)
    assert found.hours == pytest.approx(1000 * effective / speed / 3600)
    assert found.baseline_hours == pytest.approx(1000 * effective / todays / 3600)
    slow, fast = finished[0].evidence.samples_per_second_interval
    assert found.hours_interval == pytest.approx(tuple(1000 * effective / end / 3600 for end in (fast, slow)))
    shared = job(samples=1_000_001, num_ranks=4, price_per_hour=3)
    assert shared.num_steps == -(-1_000_001 // (effective * 4)), "the last step is a whole one"
    assert shared.hours == pytest.approx(1_000_001 / (speed * 4) / 3600)
    assert shared.price == pytest.approx(3 * shared.hours)
    assert shared.price_interval == pytest.approx(tuple(3 * hours for hours in shared.hours_interval))
    assert "3 an hour" in job_line(shared)
    of_two_ranks = cost_of_training(config, finished[0].evidence, SearchOptions.from_user(steps=1000), 2)
    assert of_two_ranks is not None
    assert of_two_ranks.num_samples == 2 * 1000 * effective, "each step takes a batch on each rank"


@pytest.mark.parametrize(("num_sharing", "num_batches"), [(1, 2), (2, 1)])
def test_ranks_that_divide_a_batch_take_one_together(
    finished: tuple[Recommendation, StudyFolder], num_sharing: int, num_batches: int
) -> None:
    found = finished[0]
    assert found.workload is not None
    workload = msgspec.structs.replace(found.workload, num_ranks=2, num_sharing=num_sharing)
    shared = msgspec.structs.replace(found, workload=workload)
    assert shared.num_batches == num_batches
    assert ("on each of 2 ranks" in dict(shared.facts())["set"]) is (num_batches == 2)


def test_without_its_records_nothing_is_ranked(finished: tuple[Recommendation, StudyFolder], tmp_path: Path) -> None:
    found, folder = finished
    with pytest.raises(StudyError, match="lacks the trials"):
        rerank(found, OPTIONS, StudyFolder(str(tmp_path), "moved"))
    with pytest.raises(StudyError, match="lacks the trials"):
        rerank(msgspec.structs.replace(found, workload=None, options={}), OPTIONS, folder)


def test_show_keeps_what_it_is_not_told(finished: tuple[Recommendation, StudyFolder]) -> None:
    found, folder = finished
    before = folder.recommendation_path.read_bytes()
    memory = rerank_with_options(found, folder.recommendation_path, objective="memory", steps=100)
    priced = rerank_with_options(memory, folder.recommendation_path, price_per_hour=3.0)
    assert (priced.objective, priced.options["num_steps"]) == ("memory", 100)
    assert priced.job is not None
    assert priced.job.price == pytest.approx(3.0 * priced.job.hours)
    by_samples = rerank_with_options(priced, folder.recommendation_path, samples=500)
    assert (by_samples.options["num_steps"], by_samples.options["num_samples"]) == (None, 500)
    assert folder.recommendation_path.read_bytes() == before
    with pytest.raises(InvalidRequestError, match="objective is 'size'"):
        rerank_with_options(found, folder.recommendation_path, objective="size")
    stopped = msgspec.structs.replace(found, search=msgspec.structs.replace(found.search, was_interrupted=True))
    with pytest.raises(InvalidRequestError, match="interrupted"):
        rerank_with_options(stopped, folder.recommendation_path, objective="memory")


def test_a_cached_answer_is_ranked_again_only_where_another_is_asked_for(
    finished: tuple[Recommendation, StudyFolder],
) -> None:
    found, folder = finished
    notes = list[str]()
    progress = Progress()
    progress.note = notes.append  # type: ignore[assignment,method-assign]
    try:
        assert cached_recommendation(found, OPTIONS, folder, progress, found.fingerprint) is found
        assert notes == []
        again = cached_recommendation(found, asked(objective="memory"), folder, progress, found.fingerprint)
        assert again is not None
        assert again.objective == "memory"
        assert Recommendation.load(folder.recommendation_path).to_json() == again.to_json()
        assert "no trial was run" in notes[0]
    finally:
        folder.save(found)
    stopped = msgspec.structs.replace(found, search=msgspec.structs.replace(found.search, was_interrupted=True))
    assert cached_recommendation(stopped, asked(objective="memory"), folder, progress, found.fingerprint) is None
    assert cached_recommendation(found, OPTIONS, folder, progress, Fingerprint(digest="other", parts={})) is None


def test_a_plain_cached_answer_imports_nothing_for_it() -> None:
    program = (
        "import sys, autotune_amp.api\n"
        "heavy = {'rich', 'optuna', 'filelock', 'numpy', 'torch', 'autotune_amp.search.answer.decide', "
        "'autotune_amp.search.ledger'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
