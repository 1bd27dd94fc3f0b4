"""Where a workload comes from: live objects of the calling process, or a name that a child imports."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.core.outcome import Failure
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.search.folder import folder_name, study_name

if TYPE_CHECKING:
    from autotune_amp.isolation.local import LocalBackend, Payload  # at run time only where a search begins


_FINGERPRINT_SECONDS = 60.0


class Origin(ABC):
    """A workload that has not been loaded yet. `name` is what its study is called unless told otherwise."""

    name: str

    @abstractmethod
    def payload(self) -> Payload:
        """What a trial process needs to get the workload."""

    def num_threads(self) -> int | None:
        """The threads that trials use; None leaves it to what the workload's code asks for."""
        return None

    @abstractmethod
    def torch_state(self, found_by_child: dict[str, Any]) -> dict[str, Any]:
        """The torch state that trials take over, given what a child found after loading."""

    def fingerprint(self, options: dict[str, Any], identity: DeviceIdentity) -> Fingerprint | None:  # noqa: ARG002
        """What a recommendation would hold for, known without a child; None where that is not possible."""
        return None

    def fingerprint_by_child(
        self, options: dict[str, Any], identity: DeviceIdentity, runner: LocalBackend, state: dict[str, Any]
    ) -> Fingerprint:
        """The same from the process that imported the workload; nothing of it is called there either."""
        from autotune_amp.trial.jobs import FingerprintJob

        answer = runner.submit(
            FingerprintJob(
                device=identity.type,
                options=options,
                identity=identity,
                torch_state=state,
                deadline_seconds=_FINGERPRINT_SECONDS,
            )
        ).result()
        if isinstance(answer, Failure):
            return Fingerprint(
                digest="", parts={}, unknown=(f"the workload cannot be fingerprinted: {answer.message}",)
            )
        return answer

    def held_bytes(self, device: str) -> int:
        """What the calling process holds on the device."""
        import psutil

        return int(psutil.Process().memory_info().rss) if device == "cpu" else 0


class _Target(Origin):
    """Imported by the child, never by this process: user code may crash on import."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.name = "embedded" if target.startswith("autotune_amp.workloads.transformer:") else study_name(target)

    def payload(self) -> Payload:
        from autotune_amp.isolation.local import Payload

        # As `python -m` has it: modules are found from the working directory too.
        return Payload(target=self._target, path=tuple(dict.fromkeys((str(Path.cwd()), *_import_path()))))

    def torch_state(self, found_by_child: dict[str, Any]) -> dict[str, Any]:
        return found_by_child


class _Live(Origin):
    """Packed here and unpacked in the child; the fingerprint needs no child."""

    def __init__(self, workload: Any) -> None:
        self._workload = workload
        self.name = folder_name(str(getattr(workload, "name", None) or getattr(workload, "__name__", "workload")))

    def payload(self) -> Payload:
        from autotune_amp.isolation.local import Payload
        from autotune_amp.isolation.packing import pack

        return Payload(target=None, packed=pack(self._workload), path=_import_path())

    def torch_state(self, found_by_child: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - the caller's is what counts
        from autotune_amp.precision import torch_state

        return torch_state.capture()

    def fingerprint(self, options: dict[str, Any], identity: DeviceIdentity) -> Fingerprint | None:
        from autotune_amp.fingerprint import compute
        from autotune_amp.precision import torch_state

        return compute(self._workload, options, identity, torch_state.capture())

    def num_threads(self) -> int | None:
        threads: int = self.torch_state({})["num_threads"]
        return threads

    def held_bytes(self, device: str) -> int:
        torch = sys.modules.get("torch")
        if device.startswith("cuda") and torch is not None and torch.cuda.is_initialized():
            return int(torch.cuda.memory_reserved(device))
        return super().held_bytes(device)


def target(name: str) -> Origin:
    """A workload named as "path/file.py:function" or "package.module:function"."""
    if ":" not in name:
        raise WorkloadError(f"{name!r} names no workload.", "Give path/file.py:function or package.module:function.")
    return _Target(name)


def live(workload: Any) -> Origin:
    """A Workload of the calling process, or a function that returns one."""
    from autotune_amp.core.workload import check_source

    check_source(workload, "workload")
    return _Live(workload)


def _import_path() -> tuple[str, ...]:
    return tuple(str(Path(entry).absolute()) for entry in sys.path)
