"""Transformers: the controller in a Trainer, the callback that reports it, and a workload from a Trainer."""

from autotune_amp.integrations.transformers.trainer import AutotuneCallback, AutotuneTrainer

__all__ = ["AutotuneCallback", "AutotuneTrainer"]
