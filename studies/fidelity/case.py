"""Case: one workload of the zoo and what a true verdict about it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune_amp import Workload


@dataclass(frozen=True)
class Case:
    """A tiny workload, in which precisions it must be caught, and what must be blamed.

    make                what trains: at a batch of 8 one fp32 step takes less than 30 ms, one fp16 step less than 1 s
    sick_in             the precisions ("bf16", "fp16", and "fp32" for low-precision weights) in which it is harmed
    culprit             regex that `re.search` must find in the responsible module's name in `model.named_modules()`;
                        None where the loss function or the optimizer is responsible, or the case is healthy
    is_healable         pinning a few modules (at most max(1, 5 % of them)) in fp32 must make it faithful
    is_unsupported_in   precisions in which the CPU cannot run it at all
    """

    name: str
    make: Callable[[], Workload]
    sick_in: tuple[str, ...] = ()
    culprit: str | None = None
    is_healable: bool = False
    is_unsupported_in: tuple[str, ...] = ()
    note: str = ""
    batch_size: int = 8
