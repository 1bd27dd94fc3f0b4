"""Where the time of a training step goes: torch.profiler's trace taken apart, and what may gain by it."""
