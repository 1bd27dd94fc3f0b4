from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from autotune_amp.command.frozen_pair import FrozenPair, PairingProblem, pair_steps
from autotune_amp.command.messages import Gradient
from autotune_amp.core.outcome import Fidelity


def gradient(number: int, path: str = "low", rank: int = 0, **fields: Any) -> Gradient:
    known: dict[str, Any] = {"batch": "b", "optimizer": 0, "sizes": (2, 3), **fields}
    known = {"weights": f"of {known['optimizer']}", **known}
    return Gradient(pid=1, time=0.0, rank=rank, world=2, number=number, path=f"{path}{number}{rank}", **known)


def test_steps_are_paired_by_batch_and_rank() -> None:
    low = [gradient(number, rank=rank) for number in (0, 1) for rank in (0, 1)]
    reference = [gradient(number, "fp32", rank) for rank in (1, 0) for number in (1, 0, 2)]
    found = pair_steps(low, reference)
    assert [[(step.low, step.reference) for step in batch] for batch in found if isinstance(batch, tuple)] == [
        [("low00", "fp3200"), ("low01", "fp3201")],
        [("low10", "fp3210"), ("low11", "fp3211")],
    ]


def test_the_nth_step_of_each_optimizer_is_at_the_nth_batch() -> None:
    """As in a GAN, whose steps are counted together; the low precision has skipped the first two."""
    reference = [gradient(number, "fp32", optimizer=number % 2) for number in range(6)]
    found = pair_steps([gradient(step.number, optimizer=step.optimizer) for step in reference[2:]], reference)
    assert [[(step.name, step.low) for step in batch] for batch in found if isinstance(batch, tuple)] == [
        [("rank 0, optimizer 0, part 0", "low20"), ("rank 0, optimizer 1, part 0", "low30")],
        [("rank 0, optimizer 0, part 0", "low40"), ("rank 0, optimizer 1, part 0", "low50")],
    ]


def test_the_optimizers_that_a_script_makes_for_the_same_weights_are_one() -> None:
    """As one that is made anew in each round; weights of other sizes are others, though both are zero."""
    steps = [gradient(number, optimizer=number, weights="w", sizes=((2, 3), (5,))[number % 2]) for number in range(4)]
    found = pair_steps(steps, steps)
    assert [[step.name for step in batch] for batch in found if isinstance(batch, tuple)] == [
        ["rank 0, optimizer 0, part 0", "rank 0, optimizer 1, part 0"]
    ] * 2


def test_what_is_not_alike_is_not_held_against_each_other() -> None:
    for low, reference, named in (
        ([gradient(0)], [gradient(0, weights="other")], "weights"),
        ([gradient(0)], [gradient(0, batch="other")], "batches"),
        ([gradient(0)], [gradient(1)], "no step"),
        ([], [], "no step"),
        ([gradient(0, batch=None)], [gradient(0, batch=None)], "no batch"),
        ([gradient(0)], [gradient(0, has_low_weights=True)], "cannot be converted to fp32"),
    ):
        found = pair_steps(low, reference)
        assert isinstance(found, PairingProblem)
        with_other_arguments = pair_steps(low, reference, has_other_arguments=True)
        assert isinstance(with_other_arguments, PairingProblem)
        assert ("this value changes" in with_other_arguments.why) is (named in ("weights", "batches"))
        assert ("not seeded" in with_other_arguments.why) is (named in ("weights", "batches"))
        assert named in found.why
        assert found.next_step


def test_the_job_reads_the_gradients_from_their_files(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    low: list[Gradient] = []
    reference: list[Gradient] = []
    for number in range(6):  # of two optimizers, whose parameters differ in size
        sizes = ((2, 3), (4,))[number % 2]
        values = torch.randn(sum(sizes), generator=chance)
        for which, of_run in (("low", low), ("fp32", reference)):
            written = values if which == "fp32" else values.bfloat16().float()
            path = tmp_path / f"{which}{number}0"
            path.write_bytes(written.numpy().tobytes())
            of_run.append(gradient(number, str(tmp_path / which), optimizer=number % 2, sizes=sizes))
    steps = pair_steps(low, reference)
    assert not isinstance(steps, PairingProblem)
    job = FrozenPair(
        device="cpu",
        precision="bf16",
        label="bf16 attn=eager",
        batch_size=4,
        steps=steps,
        losses=((1.0, 1.0, 1.0), (1.0, 1.0, 1.0)),
    )
    found = job.run(None, lambda _: None)
    assert isinstance(found, Fidelity)
    assert found.verdict == "faithful"
    assert "bf16 attn=eager" in found.reason
    names = ("optimizer 0, part 0, parameter 0", "optimizer 0, part 0, parameter 1", "optimizer 1, part 0, parameter 0")
    assert {each.name for each in found.worst_parameters} == {f"rank 0, {name}" for name in names}
