"""Tokens as the objective, their price, and the utilization that follows from the operations of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_backend import ScriptedSearch, all_well, described, fidelity, hardware, measured
from test_decide import BF16, FP32, Log, decided

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.evidence import speedup_line, utilization_line
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import CheckOutcome, CountedFlops, Description, Fidelity, Measurement, Outcome
from autotune_amp.core.recommendation import Fingerprint, Recommendation, SearchSummary
from autotune_amp.search.answer.decide import recommend, unit_price, utilization
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.space import build_space
from autotune_amp.trial.jobs import Check, Trial

OPTIONS = SearchOptions(precisions=("fp32", "bf16"))
DEVICE = hardware({"fp32": 1.0, "tf32": None, "bf16": 2.0, "fp16": None, "fp8": None})


def with_tokens(measurement: Measurement, per_sample: float, padded_share: float = 0.5) -> Measurement:
    tokens = per_sample * measurement.samples_per_second
    return msgspec.structs.replace(measurement, tokens_per_second=tokens, padded_share=padded_share)


def answer(spec: Trial) -> Outcome:
    """Of samples fp32 trains on the most a second, of tokens bf16 does: its samples are longer."""
    is_fp32 = spec.candidate.precision == "fp32"
    return with_tokens(measured(spec, 150.0 if is_fp32 else 100.0), 10.0 if is_fp32 else 20.0)


def searched(objective: Any, folder: Path, answer: Any = answer, check: Any = all_well) -> Recommendation:
    # Only the ledger's objective: it may become tokens though speed was asked for.
    options = msgspec.structs.replace(OPTIONS, num_steps=1000, price_per_hour=3.6)
    description, device = described(), DEVICE
    ours = ScriptedSearch(build_space(device, description, options), answer, 300.0, check_answer=check, device=device)
    ours.ledger.requested_objective = objective
    ours.explore(is_checked=True)
    assert ours.ledger.final_shortlist is not None
    ours.confirm(ours.ledger.final_shortlist, {})
    return recommend(
        ours.ledger,
        options=options,
        environment={},
        hardware=device,
        workload=description,
        search=SearchSummary(study=folder.name, num_trials=9, num_failures=0, seconds=1.0),
        fingerprint=Fingerprint(digest="d", parts={}),
        versions={},
    )


def test_tokens_choose_and_confirm_what_samples_would_not(tmp_path: Path) -> None:
    by_samples, by_tokens = searched("speed", tmp_path), searched("tokens", tmp_path)
    assert by_samples.config.precision == "fp32"
    assert by_tokens.config.precision == "bf16"
    evidence = by_tokens.evidence
    assert evidence.is_confirmed
    assert evidence.tokens_per_second == pytest.approx(2000)
    assert evidence.samples_per_second == pytest.approx(100)
    assert evidence.speedup == pytest.approx(2000 / 1500)
    assert evidence.speedup_interval is not None
    assert evidence.speedup_interval[0] > 1
    assert evidence.tokens_per_second_interval is not None
    cost = by_tokens.job
    assert cost is not None
    assert cost.baseline_hours == pytest.approx(cost.hours * 2000 / 1500), "of as many tokens"
    assert "1,500 tokens/s" in speedup_line(evidence)
    low, high = evidence.tokens_per_second_interval
    assert low <= 2000 <= high
    rows = {row.precision: row.tokens_per_second for row in by_tokens.candidates if row.tokens_per_second}
    assert rows == pytest.approx({"fp32": 1500, "bf16": 2000})
    assert "tokens/s" in dict(by_tokens.answer())["speed"]
    assert "50 %" in dict(by_tokens.facts())["tokens"]


def test_tokens_are_refused_where_no_batch_holds_them() -> None:
    log = Log().add(FP32, 100.0).add(BF16, 200.0)
    with pytest.raises(InvalidRequestError, match="input_ids"):
        decided(log, objective="tokens")


def test_a_price_is_that_of_a_million_tokens_or_of_samples_without_them(tmp_path: Path) -> None:
    found = searched("tokens", tmp_path)
    price = found.unit_price  # 3.6 an hour are a thousandth a second, in which it trains on 2,000 tokens
    assert price is not None
    assert price.unit == "tokens"
    assert price.price == pytest.approx(0.5)
    assert price.baseline_price == pytest.approx(1e6 * 0.001 / 1500)
    assert price.price_interval[0] <= 0.5 <= price.price_interval[1]
    assert "million tokens" in dict(found.answer())["cost"]
    without = msgspec.structs.replace(found.evidence, tokens_per_second=None, tokens_per_second_interval=None)
    by_samples = unit_price(without, SearchOptions(price_per_hour=3.6, num_ranks=2))
    assert by_samples is not None
    assert by_samples.unit == "samples"
    assert by_samples.price == pytest.approx(1e6 * 0.001 / 100 / 2), "of two groups, which train on twice as many"
    assert unit_price(without, SearchOptions()) is None


def on_gpu(name: str) -> Hardware:
    identity = msgspec.structs.replace(DEVICE.identity, type="cuda", name=name)
    rates = {
        precision: msgspec.structs.replace(capability, matmul_flops_per_second=500e12)
        for precision, capability in DEVICE.precisions.items()
    }
    return msgspec.structs.replace(DEVICE, identity=identity, precisions=rates)


def decision_with(counted: CountedFlops | None, *, has_tokens: bool = True) -> Any:
    log = Log()
    for setting, speed in ((FP32, 50.0), (BF16, 100.0)):
        measurement = measured(Trial(candidate=setting, device="cpu"), speed)
        log.add(setting, with_tokens(measurement, 20.0) if has_tokens else measurement)
    log.add(BF16, msgspec.structs.replace(fidelity("bf16"), counted_flops=counted), "fidelity")
    return decided(log), log.records


@pytest.mark.parametrize(
    ("counted", "has_tokens", "flops_per_second"),
    [
        (CountedFlops(flops=8 * 10**12, num_samples=4), True, 2e12 * 100),
        # Half of the positions are padding: 40 of a sample, 4,000 a second.
        (CountedFlops(flops=8 * 10**12, num_samples=4, num_positions=400), True, 2e10 * 4000),
        (CountedFlops(flops=8 * 10**12, num_samples=4, num_positions=400), False, 2e12 * 100),
    ],
)
def test_utilization_is_the_operations_a_second_over_the_rates_of_all_devices(
    counted: CountedFlops, has_tokens: bool, flops_per_second: float
) -> None:
    decision, records = decision_with(counted, has_tokens=has_tokens)
    assert decision.config.precision == "bf16"
    found = utilization(decision, records, on_gpu("NVIDIA H100 PCIe"), described(num_ranks=2))
    assert found.flops_per_second == pytest.approx(flops_per_second)
    assert found.mfu == pytest.approx(flops_per_second / 1e15)
    assert found.data_sheet_mfu == pytest.approx(flops_per_second / 2 / 756e12)
    assert "data sheet" in utilization_line(found)
    unlisted = utilization(decision, records, on_gpu("NVIDIA GeForce RTX 3060"), described())
    assert unlisted.data_sheet_mfu is None


def test_an_emulated_precision_has_no_rate_to_be_held_against() -> None:
    decision, records = decision_with(CountedFlops(flops=8 * 10**12, num_samples=4), has_tokens=False)
    device = on_gpu("NVIDIA GeForce RTX 3060")
    emulated = msgspec.structs.replace(device.precisions["bf16"], level="emulated")
    device = msgspec.structs.replace(device, precisions={**device.precisions, "bf16": emulated})
    found = utilization(decision, records, device, described())
    assert found.mfu is None
    assert "emulated" in utilization_line(found)


@pytest.mark.parametrize(("weights", "product"), [("fp32", "fp32"), ("bf16", "bf16"), ("frozen_low", None)])
def test_without_autocast_products_are_computed_in_the_weights_precision(
    weights: Any, product: Any, tmp_path: Path
) -> None:
    found = searched("speed", tmp_path)  # fp32 wins
    rates: dict[Any, float] = {"fp32": 1e12, "bf16": 2e12}
    device = on_gpu("NVIDIA H200")
    precisions = {
        p: msgspec.structs.replace(device.precisions[p], matmul_flops_per_second=rate) for p, rate in rates.items()
    }
    device = msgspec.structs.replace(device, precisions=precisions)
    workload = described(weights=weights, counted_flops=CountedFlops(flops=8, num_samples=4))
    used = utilization(found, (), device, workload)
    assert (used.precision, used.machine_flops_per_second) == (product, rates.get(product))
    assert (used.data_sheet_mfu is None, used.problem is None) == (product is None, product is not None)
    found = msgspec.structs.replace(found, utilization=used, workload=workload, hardware=device)
    assert found.measured_flops is not None
    assert found.measured_flops.machine_flops_per_second.get("fp32") == rates.get(product)


def test_products_under_the_scripts_own_flags_count_as_tf32(tmp_path: Path) -> None:
    found = searched("speed", tmp_path)  # fp32 wins
    found = msgspec.structs.replace(found, config=msgspec.structs.replace(found.config, as_found=True))
    used = utilization(
        found, (), on_gpu("NVIDIA H200"), described(counted_flops=CountedFlops(flops=8 * 10**12, num_samples=4))
    )
    assert used.precision == "tf32"
    assert used.data_sheet_flops_per_second == pytest.approx(494.5e12)
    assert used.data_sheet_mfu == pytest.approx(2e12 * found.evidence.samples_per_second / 494.5e12)


@pytest.mark.parametrize(
    ("counted", "reason"),
    [
        (CountedFlops(flops=None, num_samples=4, problem="its own kernel"), "its own kernel"),
        (None, "counted"),
    ],
)
def test_without_a_count_utilization_is_its_reason(counted: CountedFlops | None, reason: str) -> None:
    decision, records = decision_with(counted)
    found = utilization(decision, records, on_gpu("NVIDIA H200"), described())
    assert (found.mfu, found.flops_per_second) == (None, None)
    assert reason in utilization_line(found)


def test_operations_are_those_of_a_run_with_the_arguments_of_the_answer() -> None:
    fused = msgspec.structs.replace(BF16, arguments=(("optim", "fused"),))
    log = Log()
    for setting, speed, flops in ((FP32, 50.0, None), (BF16, 60.0, None), (fused, 100.0, 3 * 10**6)):
        measurement = measured(Trial(candidate=setting, device="cpu"), speed)
        counted = None if flops is None else CountedFlops(flops=flops, num_samples=1)
        log.add(setting, msgspec.structs.replace(measurement, counted_flops=counted))
    own: Description = described(counted_flops=CountedFlops(flops=5 * 10**6, num_samples=1))
    decision = decided(log)

    def attained(arguments: tuple[tuple[str, str], ...]) -> float | None:
        config = msgspec.structs.replace(decision.config, arguments=arguments)
        chosen = msgspec.structs.replace(decision, config=config)
        return utilization(chosen, log.records, DEVICE, own).flops_per_second

    speed = decision.evidence.samples_per_second
    assert attained(fused.arguments) == pytest.approx(3e6 * speed)
    assert attained(()) == pytest.approx(5e6 * speed)
    assert attained((("optim", "unknown"),)) is None


def test_a_commands_own_count_goes_before_those_of_checks_and_reaches_the_run(tmp_path: Path) -> None:
    def check(spec: Check) -> CheckOutcome:
        found = all_well(spec)
        count = CountedFlops(flops=3 * 10**6, num_samples=1)
        return msgspec.structs.replace(found, counted_flops=count) if isinstance(found, Fidelity) else found

    found = searched("tokens", tmp_path, check=check)
    assert found.utilization is not None
    assert found.utilization.flops_per_second == pytest.approx(3e6 * 100)
    assert found.measured_flops is not None
    assert found.measured_flops.flops_per_sample == pytest.approx(3e6)
    own: Description = described(counted_flops=CountedFlops(flops=5 * 10**6, num_samples=1))
    decision, records = decision_with(CountedFlops(flops=3 * 10**6, num_samples=1))
    assert utilization(decision, records, DEVICE, own).flops_per_second == pytest.approx(5e6 * 100)


def test_the_best_so_far_is_by_tokens_too() -> None:
    log = Log()
    for setting, speed, tokens in ((FP32, 150.0, 10.0), (BF16, 100.0, 20.0)):
        log.add(setting, with_tokens(measured(Trial(candidate=setting, device="cpu"), speed), tokens))
    space = build_space(DEVICE, described(), OPTIONS)
    by_samples, by_tokens = (
        Ledger(space, log.records, objective=objective, search_id=log.records[0].search_id).best
        for objective in ("speed", "tokens")
    )
    assert (by_samples and by_samples.candidate, by_tokens and by_tokens.candidate) == (FP32, BF16)
