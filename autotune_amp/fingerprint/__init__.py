"""What a recommendation holds for, known without running anything of the user's: see `walk` for what counts."""

from autotune_amp.fingerprint.compare import compute, versions
from autotune_amp.fingerprint.walk import workload_parts

__all__ = ["compute", "versions", "workload_parts"]
