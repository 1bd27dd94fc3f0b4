"""Two ranks, trouble on one of them: both do the same at the same step, under DDP and FSDP, and neither hangs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from rank_training import (
    BATCH,
    CONFIG,
    NUM_RANKS,
    Attached,
    Death,
    Kind,
    OptimizerName,
    Outcome,
    Scenario,
    Trouble,
    Wrapper,
    trained_by_hand,
)
from rank_worker import Ranks

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.runtime import run_log

WRAPPERS: tuple[Wrapper, ...] = ("ddp", "ddp_ignored", "fsdp1", "fsdp1_flat", "fsdp2")
# A floor so near that two overflows running are a trip.
NEAR_FLOOR = AmpConfig(
    precision="fp16",
    batch_size=BATCH,
    loss_scale=LossScale(init_scale=1024.0, min_scale=512.0),
    fallback=["bf16", "fp32"],
)
DEMOTED: list[str] = ["fp16"] * 4 + ["bf16"] * 3
DEMOTION = (4, "demotion", "fp16", "bf16")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.end()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the ranks have it: sums in another order are other numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(ranks: Ranks, scenario: Scenario, precisions: list[str], skipped: set[int]) -> Outcome:
    """The run as both ranks saw it, after these precisions and skips, with the weights of the same run by hand."""
    first, second = outcomes = ranks.run(scenario)
    assert replace(second, scales=[], weights={}) == replace(first, scales=[], weights={})
    assert len({tuple(outcomes[rank].scales) for rank in scenario.asking_ranks}) <= 1
    assert first.precisions == precisions
    assert [step for step, stepped in enumerate(first.stepped) if not stepped] == sorted(skipped)
    num_taken = len(precisions) - len(skipped)
    assert first.counts == (len(precisions), num_taken, len(skipped))
    assert first.num_callbacks == first.num_side_callbacks == num_taken
    by_hand = trained_by_hand(scenario, precisions, skipped)
    for rank in range(NUM_RANKS):
        for name, expected in by_hand[rank].items():
            mine = torch.tensor(outcomes[rank].weights[name])
            torch.testing.assert_close(mine, torch.tensor(expected), rtol=1e-5, atol=1e-7)
    if scenario.wrapper != "ddp_ignored":
        assert first.weights == second.weights
    return first


@pytest.mark.parametrize(
    ("wrapper", "optimizer", "fused"),
    [*product(WRAPPERS, ("adam",), (False, True)), ("ddp", "sgd", True)],
)
@pytest.mark.parametrize(
    ("trouble", "scale", "precisions", "skipped", "moves"),
    [
        (Trouble.at("gradient", 3), 512.0, ["fp16"] * 7, {3}, []),
        (Trouble.at("gradient", 3, rank=0), 512.0, ["fp16"] * 7, {3}, []),
        (Trouble.at("loss", 3), 1024.0, ["fp16"] * 7, {3}, []),
        (Trouble.at("input", 2, 3, 5), 1.0, DEMOTED, {2, 3}, [DEMOTION]),
    ],
    ids=["gradient", "gradient on rank 0", "loss", "input"],
)
def test_trouble_on_one_rank_is_trouble_on_both(
    ranks: Ranks,
    wrapper: Wrapper,
    optimizer: OptimizerName,
    fused: bool,
    trouble: Trouble,
    scale: float,
    precisions: list[str],
    skipped: set[int],
    moves: list[tuple[object, ...]],
) -> None:
    scenario = Scenario(wrapper=wrapper, optimizer=optimizer, fused=fused, trouble=trouble)
    outcome = run(ranks, scenario, precisions, skipped)
    assert (outcome.scales[-1], outcome.moves) == (scale, moves)


def test_one_of_the_ranks_writes_the_run_log(ranks: Ranks, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    run(ranks, Scenario(trouble=Trouble.at("input", 2, 3, 5), run_log=str(log)), DEMOTED, {2, 3})
    found = run_log.read(log)
    assert (found.begin.rank, found.begin.num_ranks) == (0, NUM_RANKS)
    assert [(move.update, move.kind, move.before, move.after) for move in found.moves] == [DEMOTION]
    assert log.read_text().count('"event":"begin"') == log.read_text().count('"event":"move"') == 1


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("attached", "kind"), [("before", "input"), ("after", "steep")])
def test_a_diagnosis_on_both_ranks_demotes_both(ranks: Ranks, wrapper: Wrapper, attached: Attached, kind: Kind) -> None:
    scenario = Scenario(
        wrapper=wrapper,
        optimizer="adam",
        trouble=Trouble.at(kind, 2, 3, 5),
        attached=attached,
        config=CONFIG if kind == "input" else NEAR_FLOOR,
    )
    outcome = run(ranks, scenario, DEMOTED, {2, 3})
    assert outcome.moves == [DEMOTION]
    assert ("module left" if kind == "input" else "the loss function") in str(outcome.history[0]["reason"])


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_diagnosis_on_both_ranks_acquits_precision_on_both(ranks: Ranks, wrapper: Wrapper, kind: Kind) -> None:
    trouble = Trouble.at(kind, 2, 3, 4, 5)
    scenario = Scenario(wrapper=wrapper, trouble=trouble, attached="after", config=NEAR_FLOOR)
    outcome = run(ranks, scenario, ["fp16"] * 7, {2, 3, 4, 5})
    assert outcome.moves == [(4, "not_precision", "fp16", "fp16")]
    assert outcome.scales[-1] == 1024.0


@pytest.mark.parametrize(("wrapper", "attached"), [*((w, "before") for w in WRAPPERS), ("ddp", "no")])
def test_without_a_rerun_both_ranks_stop_at_the_same_step_and_say_the_same(
    ranks: Ranks, wrapper: Wrapper, attached: Attached
) -> None:
    scenario = Scenario(
        wrapper=wrapper,
        trouble=Trouble.at("gradient", 2, 3, 4, 5, 6),
        attached=attached,
        has_rerun=False,
        config=NEAR_FLOOR,
        num_steps=9,
    )
    outcome = run(ranks, scenario, DEMOTED, {2, 3, 4, 5, 6})
    assert outcome.moves == [DEMOTION, (7, "revert", "bf16", "fp16"), (7, "stop", "fp16", "fp16")]
    assert outcome.error is not None
    assert outcome.error.startswith("NotPrecisionError")
    if attached == "before" and wrapper == "ddp_ignored":  # on rank 1 alone
        assert "the gradients of side.weight" in outcome.error


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_bad_pass_on_one_rank_voids_the_window_on_both(ranks: Ranks, wrapper: Wrapper) -> None:
    scenario = Scenario(wrapper=wrapper, trouble=Trouble.at("input", 2, 3, 5), accumulation_steps=2)
    assert run(ranks, scenario, DEMOTED, {2, 3}).moves == [DEMOTION]


@pytest.mark.parametrize(("fused", "num_optimizers", "rank"), [(False, 1, 0), (True, 2, 1)])
def test_gradients_missing_on_one_rank_hold_nobody_up(
    ranks: Ranks, fused: bool, num_optimizers: int, rank: int
) -> None:
    trouble = Trouble.at("unused", 2, 3, 5, rank=rank)
    scenario = Scenario("ddp_ignored", "adam", fused, trouble, num_optimizers=num_optimizers)
    run(ranks, scenario, ["fp16"] * 7, set())


@pytest.mark.parametrize("cramped_rank", [0, 1])
def test_a_plan_that_fits_one_rank_only_is_taken_by_neither(ranks: Ranks, cramped_rank: int) -> None:
    measured = FallbackPlan(precision="bf16", batch_size=BATCH, peak_memory_bytes=2**20)
    config = AmpConfig(precision="fp16", batch_size=BATCH, loss_scale=CONFIG.loss_scale, fallback=[measured, "fp32"])
    scenario = Scenario(trouble=Trouble.at("input", 2, 3), config=config, cramped_rank=cramped_rank)
    outcome = run(ranks, scenario, ["fp16"] * 4 + ["fp32"] * 3, {2, 3})
    assert outcome.moves == [(4, "demotion", "fp16", "fp32")]


@pytest.mark.parametrize(("attached", "rank"), [("no", 0), ("after", 1)])
def test_a_rank_may_ask_alone_how_the_run_stands(ranks: Ranks, attached: Attached, rank: int) -> None:
    """As one that logs and saves for all of them."""
    scenario = Scenario(
        trouble=Trouble.at("input", 2, 3, 5),
        attached=attached,
        asking_ranks=(rank,),
    )
    assert run(ranks, scenario, DEMOTED, {2, 3}).moves == [DEMOTION]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_ask_alone_while_verdicts_are_on_their_way(ranks: Ranks, rank: int) -> None:
    """Acting on them early would put it ahead of the other one, which waits for it at the next sample."""
    scenario = Scenario(optimizer="adam", fused=True, scaler="lagged", num_steps=20, asking_ranks=(rank,))
    assert run(ranks, scenario, ["fp16"] * 20, set()).moves == []


@pytest.mark.parametrize(("wrapper", "attached"), [*((w, "after") for w in WRAPPERS), ("ddp", "no")])
def test_verdicts_that_arrive_late_are_acted_on_at_the_same_step(
    ranks: Ranks, wrapper: Wrapper, attached: Attached
) -> None:
    scenario = Scenario(
        wrapper=wrapper,
        optimizer="adam",
        fused=True,
        trouble=Trouble.at("input", 2, 3, 4, 5, 6, 7, 8),
        attached=attached,
        scaler="lagged",
        num_steps=12,
        asking_ranks=(),
    )
    # The second bad loss is read four updates later. What was in flight then is skipped as well, before the move.
    outcome = run(ranks, scenario, ["fp16"] * 7 + ["bf16"] * 5, {2, 3, 4, 5, 6})
    assert outcome.moves == [(7, "demotion", "fp16", "bf16")]


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "where"), [("ddp", "step"), ("fsdp2", "rerun")])
def test_a_rank_that_dies_ends_the_other(tmp_path: Path, wrapper: Wrapper, where: Death) -> None:
    scenario = Scenario(wrapper=wrapper, trouble=Trouble.at("input", 2, 3), attached="after", dies_at=(3, where))
    ranks = Ranks(tmp_path)
    try:
        survivor, dead = ranks.answers(scenario)
    finally:
        ranks.end()
    assert dead == "died"
    assert isinstance(survivor, str)
    assert survivor.startswith("Traceback")
