"""A training command as a workload: what fills it, runs it, and hears of its steps."""
