"""Job that judges a precision by the gradients of two runs, which are read from files. Importing this module does not
import torch.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import msgspec

from autotune_amp.command.messages import Gradient
from autotune_amp.core.job import Job, Tell
from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.precisions import Precision


class FrozenStep(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients of one optimizer at one batch on one rank: the path of the file for each precision, and the number of
    entries of each parameter. `name` tells the rank and the optimizer.
    """

    name: str
    low: str
    reference: str
    sizes: tuple[int, ...]


class FrozenPair(Job[Fidelity], frozen=True, kw_only=True):
    """Job that judges the fidelity of `precision` by the gradients of `steps`, grouped by batch. `label` names it with
    the arguments of the command that it ran with. `losses` are those of the low precision, then those of fp32.
    """

    answer: ClassVar[Any] = Fidelity

    precision: Precision
    label: str
    batch_size: int
    steps: tuple[tuple[FrozenStep, ...], ...]
    losses: tuple[tuple[float, ...], tuple[float, ...]]

    def run(self, context: Any, tell: Tell) -> Fidelity:  # noqa: ARG002 - it reports no progress
        """Compare the gradients and return the fidelity; see `numerics.frozen.fidelity_from_gradients`."""
        import torch

        from autotune_amp.numerics.frozen import fidelity_from_gradients

        def read(which: str) -> list[dict[str, torch.Tensor]]:
            return [
                {
                    f"{step.name}, parameter {index}": tensor
                    for step in batch
                    for index, tensor in enumerate(
                        torch.split(
                            torch.from_file(getattr(step, which), size=sum(step.sizes), dtype=torch.float32),
                            list(step.sizes),
                        )
                    )
                }
                for batch in self.steps
            ]

        return fidelity_from_gradients(
            read("low"), read("reference"), self.losses, self.precision, self.batch_size, label=self.label
        )


class PairingProblem(NamedTuple):
    """Reason why two runs cannot be compared, and the next step for the user."""

    why: str
    next_step: str


_SEED = "Seed the random number generators: each run must start with the same weights and batches."

_SEED_OR_COMPARE = (
    f"{_SEED} If they are seeded, the value itself changes what is trained: compare the losses of both values in "
    "longer runs before relying on it."
)


def pair_steps(
    low: list[Gradient], reference: list[Gradient], *, has_other_arguments: bool = False
) -> tuple[tuple[FrozenStep, ...], ...] | PairingProblem:
    """Return the steps that both runs recorded, grouped by batch: the n-th step of the same weights on each rank; or
    why they cannot be compared. `reference` is of fp32; `has_other_arguments`: `low` has other arguments than today's.
    """
    low_by_key = {(g.number, g.rank, g.optimizer, g.part): g for g in low}
    reference_by_key = {(g.number, g.rank, g.optimizer, g.part): g for g in reference}
    common_keys = sorted(low_by_key.keys() & reference_by_key.keys())
    if not common_keys:
        return PairingProblem("the two runs have no step in common", "Give a command that takes more steps.")
    if any(reference_by_key[key].has_low_weights for key in common_keys):
        return PairingProblem(
            "the weights are in half precision, and those of FSDP or of compiled code cannot be converted to fp32 for "
            "the reference run",
            "Search once with the model loaded in fp32, or without FSDP and torch.compile.",
        )
    if any(low_by_key[key].batch is None for key in common_keys):
        return PairingProblem(
            "no batch was observed, neither from a DataLoader nor as an input of the model",
            "Call the model with its batch as tensors.",
        )
    for field, name in (("weights", "first weights"), ("batch", "batches")):
        if any(getattr(low_by_key[key], field) != getattr(reference_by_key[key], field) for key in common_keys):
            if has_other_arguments:
                return PairingProblem(
                    f"the {name} of the two runs differ: this value changes them, or they are not seeded",
                    _SEED_OR_COMPARE,
                )
            return PairingProblem(f"the {name} differ from run to run", _SEED)
    # `number` counts the steps of all optimizers. A script may make one anew for the same weights, which never change.
    first_optimizers: dict[tuple[Any, ...], int] = {}
    numbers_by_optimizer: dict[tuple[int, int], list[int]] = {}
    batches: dict[int, list[FrozenStep]] = {}
    for key in common_keys:
        number, rank, optimizer, part = key
        low_step = low_by_key[key]
        optimizer = first_optimizers.setdefault((rank, part, low_step.weights, low_step.sizes), optimizer)
        numbers = numbers_by_optimizer.setdefault((rank, optimizer), [])
        if number not in numbers:
            numbers.append(number)
        step = FrozenStep(
            name=f"rank {rank}, optimizer {optimizer}, part {part}",
            low=low_step.path,
            reference=reference_by_key[key].path,
            sizes=low_step.sizes,
        )
        batches.setdefault(numbers.index(number), []).append(step)
    return tuple(map(tuple, batches.values()))
