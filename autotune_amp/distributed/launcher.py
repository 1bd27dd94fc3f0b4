"""What a launcher puts into the environment of each rank. A trial is no rank: it sees nothing of it."""

from __future__ import annotations

# Exact names: MASTER_KEY or ROLE_ARN are the user's own. torchrun's, and those by which MPI and Slurm, and libraries
# that ask for them, tell which process this is and whom to report to.
_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"}
    | {"ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    | {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS"}
    | {"MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"}
    | {"MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"}
    | {"PMI_RANK", "PMI_SIZE", "PMI_ID", "PMI_FD", "PMI_PORT", "PMI_SPAWNED", "PMI_APPNUM", "PMI_UNIVERSE_SIZE"}
    | {"PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_ID", "PMIX_REINCARNATION"}
    | {"PMIX_SERVER_URI", "PMIX_SERVER_URI2", "PMIX_SERVER_URI21", "PMIX_SERVER_URI3", "PMIX_SERVER_URI4"}
    | {"PMIX_SERVER_URI41", "PMIX_SERVER_TMPDIR", "PMIX_SYSTEM_TMPDIR", "PMIX_HOSTNAME", "PMIX_VERSION"}
)
_FAMILIES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_")


def is_from_launcher(variable: str) -> bool:
    """Whether an environment variable of this name says which rank this is, or where the others are."""
    return variable in _NAMES or variable.startswith(_FAMILIES)
