"""The exceptions of this package. Each carries a `next_step`: one sentence that tells the user how to proceed.

Exceptions with further data are defined next to that data: `NothingWorksError` and `SearchInterruptedError` in
`recommendation`, `DemotedError` in `config`.
"""

from __future__ import annotations

from typing import ClassVar, Final

from autotune_amp.core.text import in_python

WILL_BREAK_EXIT_CODE: Final = 4  # exit code of the command `check` if it predicts a failure of the training run


class AutotuneAmpError(Exception):
    """Base class of all errors that this package defines."""

    exit_code: ClassVar[int] = 1  # exit code of the command line; 1 for errors of autotune_amp itself

    def __init__(self, message: str, next_step: str) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        # The command line prints message and next step itself; a traceback is for callers of the Python functions. Only
        # messages that begin with an option are translated, since others may quote the user's text.
        message = in_python(self.message) if self.message.startswith("--") else self.message
        return f"{message}\nNext step: {in_python(self.next_step)}"

    @property
    def kind(self) -> str:
        """Return the error's name in JSON documents, e.g. ``invalid_request``."""
        name = type(self).__name__.removesuffix("Error")
        return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class InvalidRequestError(AutotuneAmpError):
    """Raised for an invalid request by the caller."""

    exit_code = 2


class WorkloadError(InvalidRequestError):
    """Raised if the user's workload cannot be loaded, serialized or described."""


class DeviceError(InvalidRequestError):
    """Raised if the requested device does not exist or cannot be used."""


class StudyError(InvalidRequestError):
    """Raised if the study folder or the Optuna storage cannot be used."""


class StudyBusyError(StudyError):
    """Raised if another search is running in the same study folder."""


class FormatError(InvalidRequestError):
    """Raised if a file is damaged or was written in a newer format."""


class BudgetTooSmallError(AutotuneAmpError):
    """Raised if the budget was too small to measure anything."""

    exit_code = 2


class RunnerError(AutotuneAmpError):
    """Raised if a process of this package fails: a trial process cannot be started, or dies while it records a step
    that runs without recording; or a rank gets no answer from rank 0, which runs the search."""


class ClusterLostError(AutotuneAmpError):
    """Raised if the cluster that the search ran on, or its last node, is no longer available."""


class TrainingStoppedError(AutotuneAmpError):
    """Base class of errors by which the runtime controller stops a training run on purpose."""


class NotPrecisionError(TrainingStoppedError):
    """Raised if the loss or the gradients are non-finite in fp32 too, so precision is not the cause."""


class NoRungFitsError(TrainingStoppedError):
    """Raised if precision is the cause of a failure and no remaining fallback fits."""
