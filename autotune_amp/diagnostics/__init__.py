"""Diagnostics without a search: what breaks under autocast, memory, gains of mixed precision, fidelity."""
