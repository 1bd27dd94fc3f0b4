"""The error tree. Every error carries `next_step`: what the reader can do about it, in one sentence.

An error that carries more is defined beside what it carries: `NothingWorksError` and `SearchInterruptedError` in
`recommendation`, `DemotedError` in `config`.
"""

from __future__ import annotations

from typing import ClassVar, Final

WILL_BREAK_EXIT_CODE: Final = 4  # of `check`, which has worked, and found what will break


class AutotuneAmpError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code: ClassVar[int] = 1  # of the command line; 1 where the fault is ours

    def __init__(self, message: str, next_step: str) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message}\nNext step: {self.next_step}"

    @property
    def kind(self) -> str:
        """The error's name in JSON documents, e.g. ``invalid_request``."""
        name = type(self).__name__.removesuffix("Error")
        return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class InvalidRequestError(AutotuneAmpError):
    """The request itself is wrong."""

    exit_code = 2


class WorkloadError(InvalidRequestError):
    """The user's workload cannot be loaded, packed or described."""


class DeviceError(InvalidRequestError):
    """The device asked for is not there or cannot be used."""


class StudyError(InvalidRequestError):
    """The study folder or the Optuna storage cannot be used."""


class StudyBusyError(StudyError):
    """Another search is running in the same folder."""


class FormatError(InvalidRequestError):
    """A file is damaged, or written by a newer format."""


class BudgetTooSmallError(AutotuneAmpError):
    """Nothing could be measured within the budget."""

    exit_code = 2


class RunnerError(AutotuneAmpError):
    """Our own processes fail, as one that cannot be started, that dies while it records a step which works without
    being recorded, or rank 0, which searches for all ranks, and cannot be heard."""


class ClusterLostError(AutotuneAmpError):
    """The cluster that a search ran on, or the last node of it, is there no more."""


class TrainingStoppedError(AutotuneAmpError):
    """The runtime controller ended the training run on purpose."""


class NotPrecisionError(TrainingStoppedError):
    """Loss or gradients are non-finite in fp32 too: precision is not at fault."""


class NoRungFitsError(TrainingStoppedError):
    """Precision is at fault, and no rung is left that fits."""
