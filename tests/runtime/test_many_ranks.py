"""Two ranks, trouble on one of them: both do the same at the same step, under DDP and FSDP, and neither hangs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_python import ForkServer
from rank_training import (
    BATCH,
    CONFIG,
    NUM_RANKS,
    Outcome,
    Scenario,
    Trouble,
    Wrapper,
)
from rank_worker import Ranks

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.runtime import run_log

WRAPPERS: tuple[Wrapper, ...] = ("ddp", "ddp_ignored", "fsdp1", "fsdp2")
# A floor so near that two overflows running are a trip.
NEAR_FLOOR = AmpConfig(
    precision="fp16",
    batch_size=BATCH,
    loss_scale=LossScale(init_scale=1024.0, min_scale=512.0),
    fallback=["bf16", "fp32"],
)
BF16 = AmpConfig(precision="bf16", batch_size=BATCH, fallback=["fp32"])
FP16: list[str] = ["fp16"] * 7
DEMOTED: list[str] = ["fp16"] * 4 + ["bf16"] * 3
DEMOTION = (4, "demotion", "fp16", "bf16")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"), fork_server)
    yield started
    started.end()


def run(ranks: Ranks, scenario: Scenario, precisions: list[str], skipped: set[int], moves: list[Any]) -> Outcome:
    """The run as both ranks saw it, after these precisions and skips, with the same weights."""
    first, second = outcomes = ranks.run(scenario)
    assert replace(second, scales=[], weights={}) == replace(first, scales=[], weights={})
    assert len({tuple(outcomes[rank].scales) for rank in scenario.asking_ranks}) <= 1
    assert (first.precisions, first.moves) == (precisions, moves)
    assert [step for step, stepped in enumerate(first.stepped) if not stepped] == sorted(skipped)
    num_taken = len(precisions) - len(skipped)
    assert first.counts == (len(precisions), num_taken, len(skipped))
    assert first.callbacks == ["any", "side"] * num_taken
    if scenario.wrapper != "ddp_ignored":
        assert first.weights == second.weights
    return first


CRAMPED = AmpConfig(
    precision="fp16",
    batch_size=BATCH,
    loss_scale=CONFIG.loss_scale,
    fallback=[FallbackPlan(precision="bf16", batch_size=BATCH, peak_memory_bytes=2**20), "fp32"],
)
REVERTED = [DEMOTION, (7, "revert", "bf16", "fp16"), (7, "stop", "fp16", "fp16")]
# The precisions that a run goes through, the steps that it skips, its moves.
Course = tuple[list[str], set[int], list[Any]]
DEMOTES: Course = (DEMOTED, {2, 3}, [DEMOTION])
at = Trouble.at
late = partial(Scenario, fused=True, scaler="lagged")
EVERYWHERE: dict[str, tuple[Scenario, Course]] = {
    "a gradient": (Scenario(trouble=at("gradient", 3)), (FP16, {3}, [])),
    "a gradient on rank 0": (Scenario(fused=True, trouble=at("gradient", 3, rank=0)), (FP16, {3}, [])),
    "inputs": (Scenario(fused=True, trouble=at("input", 2, 3, 5)), DEMOTES),
    "diagnosed": (Scenario(trouble=at("input", 2, 3, 5), attached="before"), DEMOTES),
    "steep": (Scenario(trouble=at("steep", 2, 3, 5), attached="after", config=NEAR_FLOOR), DEMOTES),
    "acquitted": (
        Scenario(trouble=at("loss", 2, 3, 4, 5), attached="after"),
        (FP16, {2, 3, 4, 5}, [(4, "not_precision", "fp16", "fp16")]),
    ),
    "no rerun": (
        Scenario(trouble=at("gradient", *range(2, 7)), attached="before", has_rerun=False, config=NEAR_FLOOR),
        (DEMOTED, {2, 3, 4, 5, 6}, REVERTED),
    ),
    "a bad pass in a window": (Scenario(trouble=at("input", 2, 3, 5), accumulation_steps=2), DEMOTES),
    "in one call": (Scenario(trouble=at("input", 2, 3, 5), in_one_call=True), DEMOTES),
    # The second bad loss is read four updates later. What was in flight then is skipped as well, before the move.
    "late": (
        late(trouble=at("input", *range(2, 9)), attached="after", num_steps=12, asking_ranks=()),
        (["fp16"] * 7 + ["bf16"] * 5, {2, 3, 4, 5, 6}, [(7, "demotion", "fp16", "bf16")]),
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_trouble_on_one_rank_is_trouble_on_both(ranks: Ranks, wrapper: Wrapper, name: str) -> None:
    scenario, course = EVERYWHERE[name]
    outcome = run(ranks, replace(scenario, wrapper=wrapper), *course)
    if outcome.moves == REVERTED:
        assert str(outcome.error).startswith("NotPrecisionError")


missing = partial(Scenario, "ddp_ignored")
TO_THE_END: Course = (["fp16"] * 20, set(), [])
ALONE: dict[str, tuple[Scenario, Course]] = {
    "attention on rank 1": (
        Scenario(trouble=at("attention", 2, 3, 4), attached="before", config=BF16),
        (["bf16"] * 7, {2, 3}, [(4, "attention", "bf16", "bf16")]),
    ),
    "no gradients on rank 0": (missing(trouble=at("unused", 2, 3, 5, rank=0)), (FP16, set(), [])),
    "no gradients on rank 1": (
        missing(fused=True, trouble=at("unused", 2, 3, 5), num_optimizers=2),
        (FP16, set(), []),
    ),
    "no room on rank 1": (
        Scenario(trouble=at("input", 2, 3), config=CRAMPED, cramped_rank=1),
        (["fp16"] * 4 + ["fp32"] * 3, {2, 3}, [(4, "demotion", "fp16", "fp32")]),
    ),
    "the closure names no one model on rank 0": (
        Scenario(trouble=at("input", 2, 3, 5), names_more_on_rank=0),
        DEMOTES,
    ),
    # As one that logs and saves for all of them.
    "rank 0 asks": (Scenario(trouble=at("input", 2, 3, 5), asking_ranks=(0,)), DEMOTES),
    "rank 1 asks": (Scenario(trouble=at("input", 2, 3, 5), attached="after", asking_ranks=(1,)), DEMOTES),
    # Acting on verdicts early would put it ahead of the other one, which waits for it at the next sample.
    "rank 0 asks, verdicts on their way": (late(num_steps=20, asking_ranks=(0,)), TO_THE_END),
    "rank 1 asks, verdicts on their way": (late(num_steps=20, asking_ranks=(1,)), TO_THE_END),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_one_rank_lacks_or_asks_alone_holds_nobody_up(ranks: Ranks, name: str) -> None:
    scenario, course = ALONE[name]
    run(ranks, scenario, *course)


def test_one_of_the_ranks_writes_the_run_log(ranks: Ranks, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    run(ranks, Scenario(trouble=at("input", 2, 3, 5), run_log=str(log)), *DEMOTES)
    found = run_log.read(log)
    assert (found.begin.rank, found.begin.num_ranks) == (0, NUM_RANKS)
    assert [(move.update, move.kind, move.before, move.after) for move in found.moves] == [DEMOTION]
    assert log.read_text().count('"event":"begin"') == 1


@pytest.mark.parametrize("scaler", ["controller", "lagged"])
def test_a_signal_to_one_rank_is_heard_by_all_at_the_same_step(ranks: Ranks, scaler: Any) -> None:
    scenario = Scenario(trouble=at("signal", 1), scaler=scaler, fused=scaler == "lagged")
    assert run(ranks, scenario, FP16, set(), []).signalled_at == [1]
