"""Does mixed precision pay here, and why: precisions timed side by side on one workload, and a step taken apart."""
