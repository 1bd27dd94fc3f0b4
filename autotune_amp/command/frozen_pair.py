"""Job that compares the gradients of two frozen runs: files in, a verdict out. Importing this module imports
no torch.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import msgspec

from autotune_amp.command.messages import Gradient
from autotune_amp.core.job import Job, Tell
from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.precisions import Precision


class FrozenStep(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients of one optimizer at one batch on one rank: a file for each precision, and each parameter's number of
    entries.
    """

    low: str
    reference: str
    sizes: tuple[int, ...]


class FrozenPair(Job[Fidelity], frozen=True, kw_only=True):
    """Job that judges `precision` by `steps`, grouped by batch. `losses` are those of the low precision, then those of
    fp32.
    """

    answer: ClassVar[Any] = Fidelity

    precision: Precision
    batch_size: int
    steps: tuple[tuple[FrozenStep, ...], ...]
    losses: tuple[tuple[float, ...], tuple[float, ...]]

    def run(self, context: Any, tell: Tell) -> Fidelity:  # noqa: ARG002 - it takes no steps to tell of
        """Compare the gradients and return the fidelity; see `numerics.frozen.judge_frozen`."""
        import torch

        from autotune_amp.numerics.frozen import judge_frozen

        def read(which: str) -> list[dict[str, torch.Tensor]]:
            return [
                {
                    f"rank part {part}, parameter {index}": tensor
                    for part, step in enumerate(batch)
                    for index, tensor in enumerate(
                        torch.split(
                            torch.from_file(getattr(step, which), size=sum(step.sizes), dtype=torch.float32),
                            list(step.sizes),
                        )
                    )
                }
                for batch in self.steps
            ]

        return judge_frozen(read("low"), read("reference"), self.losses, self.precision, self.batch_size)


class Unpaired(NamedTuple):
    """Reason why two runs cannot be compared, and the next step for the user."""

    why: str
    next_step: str


_SEED = "Seed it: the same seed must give the same first weights and batches."


def pair(low: list[Gradient], reference: list[Gradient]) -> tuple[tuple[FrozenStep, ...], ...] | Unpaired:
    """Return the steps that both runs took, grouped by batch, or why the runs cannot be compared. `reference` ran in
    fp32.
    """
    ours = {(g.rank, g.optimizer, g.number): g for g in low}
    theirs = {(g.rank, g.optimizer, g.number): g for g in reference}
    both = sorted(ours.keys() & theirs.keys(), key=lambda key: (key[2], key[0], key[1]))
    if not both:
        return Unpaired("no step was made in both runs", "Give a command that takes more steps.")
    if any(theirs[key].has_low_weights for key in both):
        return Unpaired(
            "the weights are kept in half precision, and those of FSDP or in compiled code cannot be raised to fp32 "
            "to hold it against",
            "Search once with the model loaded in fp32, or without FSDP and torch.compile.",
        )
    if any(ours[key].batch is None for key in both):
        return Unpaired(
            "no batch could be seen, neither of a DataLoader nor as what enters the model",
            "Call the model with its batch as tensors.",
        )
    if any(ours[key].weights != theirs[key].weights for key in both):
        return Unpaired("the command begins with other weights every time", _SEED)
    if any(ours[key].batch != theirs[key].batch for key in both):
        return Unpaired("the command draws other batches every time", _SEED)
    numbers = dict.fromkeys(key[2] for key in both)
    return tuple(
        tuple(
            FrozenStep(low=ours[key].path, reference=theirs[key].path, sizes=ours[key].sizes)
            for key in both
            if key[2] == number
        )
        for number in numbers
    )
