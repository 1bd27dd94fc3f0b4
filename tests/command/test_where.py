"""Which rank a process of a training command is, as its launcher says."""

from __future__ import annotations

import os

import pytest

from autotune_amp.command.agent.where import rank


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, (3, 4)),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, (0, 1)),  # a batch script
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"}, (1, 2)),
    ],
)
def test_the_place_is_what_torchrun_or_srun_says(
    environment: dict[str, str], place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    found = rank()
    assert (found["rank"], found["world"]) == place
