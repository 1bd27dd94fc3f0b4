"""Diagnostics without a search, of a Workload or a training command: what breaks under autocast, memory, gains of mixed
precision, fidelity.

For a command see `autotune_amp.command`.
"""
