"""Learning rates as a trial trains with them, where a schedule has set them for another moment of the training."""

from __future__ import annotations

import torch
from torch import Tensor

# Of a schedule's peak: as in the first part of a warm-up. At the peak, a training without its warm-up may diverge.
LEAST_SHARE_OF_PEAK = 0.1


def raise_learning_rates(optimizer: torch.optim.Optimizer) -> None:
    """Raise each learning rate that a scheduler has set to at least a tenth of the schedule's peak.

    A warm-up begins at 0 and a schedule that has ended leaves 0, with which no weight of a trial would move. The peak
    is what torch's schedulers keep in the parameter group: ``initial_lr``, and OneCycleLR ``max_lr``.
    """
    for group in optimizer.param_groups:
        if "initial_lr" in group:
            rate, least = group["lr"], LEAST_SHARE_OF_PEAK * float(group.get("max_lr", group["initial_lr"]))
            if rate < least:
                # A tensor may be the user's own, which another optimizer reads.
                group["lr"] = torch.full_like(rate, least) if isinstance(rate, Tensor) else least
