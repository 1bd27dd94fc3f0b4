"""Ways to free memory of a training step, with upper bounds, from its memory by kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.text import count
from autotune_amp.memory.job import MemoryBreakdown
from autotune_amp.memory.results import LargestBatch, Saving


def savings(
    precision: Precision,
    batch_size: int,
    breakdowns: Mapping[Precision, MemoryBreakdown],
    largest: LargestBatch | None,
) -> tuple[Saving, ...]:
    """Return ways to free memory of a step in `precision`, the largest first.

    The number for another precision is measured; that for half the batch is from the memory model's slope or, without a
    model, half of the memory of its samples; the others are the bytes of the part that disappears.
    """
    own = breakdowns[precision]
    found = [
        Saving(
            kind="precision",
            num_bytes=own.taken_bytes - other.taken_bytes,
            what=f"{name}, as measured (autotune-amp fidelity --precision {name} says whether it is faithful)",
        )
        for name, other in breakdowns.items()
    ]
    if own.checkpointable_modules:
        blocks = own.checkpointable_modules
        saved = [_inside(own, block) for block in blocks]
        # One block at a time is recomputed.
        what = f"activation checkpointing of {count(len(blocks), 'block')} ({blocks[0]} ... {blocks[-1]})"
        found.append(Saving(kind="activation_checkpointing", num_bytes=sum(saved) - max(saved), what=what))
    kinds = " and ".join(dict.fromkeys(own.optimizers)) or "the optimizer"
    what = f"an optimizer without state in place of {kinds}; 8-bit state frees about three quarters of it"
    found.append(Saving(kind="optimizer_state", num_bytes=own.optimizer_state_bytes, what=what))
    if batch_size > 1:
        of_samples = own.activations_bytes + own.batch_bytes
        half = of_samples // 2 if largest is None else round(largest.bytes_per_sample * (batch_size - batch_size // 2))
        what = f"batch {batch_size // 2} with twice the accumulation steps"
        found.append(Saving(kind="batch_size", num_bytes=half, what=what))
    return tuple(sorted((s for s in found if s.num_bytes > 0), key=lambda saving: -saving.num_bytes))


def _inside(breakdown: MemoryBreakdown, block: str) -> int:
    return sum(m.num_bytes for m in breakdown.modules if m.name == block or m.name.startswith(f"{block}."))
