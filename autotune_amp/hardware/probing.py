"""probe(): asks a fresh process, this module run as a program, so that this one never touches an accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from autotune_amp.core.errors import DeviceError, RunnerError
from autotune_amp.core.hardware import Hardware
from autotune_amp.hardware.device import parse

DEADLINE_SECONDS = 120.0


class NoDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A `DeviceError` on its way to the parent."""

    message: str
    next_step: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the child writes: one of the two."""

    hardware: Hardware | None = None
    no_device: NoDevice | None = None


def probe(device: str = "auto", *, deadline_seconds: float = DEADLINE_SECONDS) -> Hardware:
    """What a device can do, measured in a child process: seconds on a CPU, up to a minute where drivers are slow.

    Raises `DeviceError` where the device cannot be used, with its reason, and `RunnerError` where the child dies or
    gives no answer within `deadline_seconds`, with the end of what it wrote to its standard error.
    """
    parse(device)
    busy = load_notes()  # before the child adds to it
    with TemporaryDirectory(prefix="autotune_amp-") as folder:
        # A file of its own: neither prints nor anything that holds an inherited pipe open can spoil it.
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        died = _run([sys.executable, "-m", "autotune_amp.hardware.probing", device, str(answer)], log, deadline_seconds)
        if died is not None or not answer.exists():
            raise _runner_error(died or "ended without an answer", log)
        reply = msgspec.json.decode(answer.read_bytes(), type=Answer)
    if reply.no_device is not None:
        raise DeviceError(reply.no_device.message, reply.no_device.next_step)
    assert reply.hardware is not None, "the child answers one of the two"
    return msgspec.structs.replace(reply.hardware, notes=(*busy, *reply.hardware.notes))


def load_notes() -> tuple[str, ...]:
    """That other work keeps this machine busy, by its load average over the last minute."""
    if not hasattr(os, "getloadavg"):
        return ()
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= 0.5 * num_cores:
        return ()
    return (f"The machine is busy with other work: load average {load:.1f} on {num_cores} CPUs; rates may be too low.",)


def _run(command: list[str], log: Path, deadline_seconds: float) -> str | None:
    """Run it where and as this process could have; returns how it died, None where it did not."""
    with log.open("wb") as output:
        try:
            status = subprocess.run(  # noqa: S603  # our own interpreter and module
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)},
                cwd=log.parent,  # "-m" searches the working directory first: it must hold no module of that name
                timeout=deadline_seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"gave no answer within {deadline_seconds:g} seconds"
        except OSError as error:
            return f"could not be started ({error})"
    if status < 0:
        return f"was ended by signal {-status}"
    return f"ended with status {status}" if status else None


def _runner_error(how: str, log: Path) -> RunnerError:
    lines = log.read_text(errors="replace").splitlines()[-20:]
    return RunnerError(
        "\n".join([f"The process that probes the device {how}.", *lines]),
        "Check that `import torch` works in a fresh Python and that the device's driver answers (nvidia-smi).",
    )


def answer(device: str) -> Answer:
    """Measure the device; a `DeviceError` becomes part of the answer, all else ends this process."""
    from autotune_amp.hardware.measuring import measure

    try:
        return Answer(hardware=measure(device))
    except DeviceError as error:
        return Answer(no_device=NoDevice(message=error.message, next_step=error.next_step))


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(answer(sys.argv[1])))
