"""Breakdowns and profiles that were made up."""

from __future__ import annotations

from typing import Any

from autotune_amp.diagnostics.memory.results import MemoryBreakdown, ModuleActivations

MIB = 2**20


def breakdown(taken_bytes: int = 100 * MIB, modules: dict[str, int] | None = None, **changes: Any) -> MemoryBreakdown:
    """One with modules of so many MiB."""
    known = {"blocks.0.mlp": 8, "blocks.1.mlp": 8, "blocks.1.norm": 4, "": 2} if modules is None else modules
    return MemoryBreakdown(
        **{
            "taken_bytes": taken_bytes,
            "allocated_bytes": None,
            "parameters_bytes": 10 * MIB,
            "buffers_bytes": 0,
            "gradients_bytes": 10 * MIB,
            "optimizer_state_bytes": 20 * MIB,
            "batch_bytes": MIB,
            "cast_weights_bytes": 0,
            "not_held_together_bytes": 6 * MIB,
            "modules": tuple(ModuleActivations(name=name, num_bytes=num * MIB) for name, num in known.items()),
            "optimizers": ("AdamW",),
            "checkpointable_modules": ("blocks.0", "blocks.1"),
            **changes,
        }
    )
