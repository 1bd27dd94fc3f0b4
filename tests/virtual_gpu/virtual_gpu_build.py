"""Builds the virtual card for the installed torch, once, and says what a process needs to run on it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).parent
NATIVE, SITE = HERE / "native", HERE / "site"
NVML, EXTENSION = "libnvidia-ml.so.1", "virtual_gpu_native"


def why_not() -> str | None:
    """Why no virtual card can be had here; None where one can."""
    if not (_torch() / "lib" / "libtorch_cuda.so").exists():
        return f"the virtual card needs a CUDA build of torch for Linux, and this is {_torch_version()}"
    if shutil.which("g++") is None:
        return "the virtual card is built by g++, which is not on PATH"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the virtual card is built with Python's headers, which are not installed"
    return None


def build() -> Path:
    """The folder of the extension and the NVML library, which the user's cache keeps: half a minute the first time."""
    sources = sorted(NATIVE.iterdir())
    # Its folder too: that is where the extension looks for torch's libraries, and other environments have others.
    parts = [str(_torch()), _torch_version(), sys.version, *(source.read_text() for source in sources)]
    digest = hashlib.sha256("".join(parts).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune_amp" / "virtual_gpu"
    built = cache / digest.hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{built.name}.lock"):
        if not built.exists():
            unfinished = cache / f"{built.name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            _compile(unfinished)
            unfinished.rename(built)
    return built


def environment(built: Path, ledger: Path) -> dict[str, str]:
    """What a process needs to find itself on the machine whose memory the file `ledger` keeps."""
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"VIRTUAL_GPU": str(built), "VIRTUAL_GPU_LEDGER": str(ledger), "PYTHONPATH": os.pathsep.join(paths)}


def _torch() -> Path:
    """Its folder, without importing it: the card must be there before."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _torch_version() -> str:
    return f"torch {importlib.metadata.version('torch')}"


def _compile(out: Path) -> None:
    headers = _torch() / "include"
    libraries = _torch() / "lib"
    shared = ["-shared", "-fPIC", "-O1"]
    extension = [
        "g++", *shared, "-std=c++20", "-w", f"-DTORCH_EXTENSION_NAME={EXTENSION}",
        f"-I{headers}", f"-I{headers / 'torch/csrc/api/include'}", f"-I{sysconfig.get_path('include')}",
        str(NATIVE / "module.cpp"), f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python",
        f"-Wl,-rpath,{libraries}", "-o", str(out / f"{EXTENSION}.so"),
    ]  # fmt: skip
    nvml = ["g++", *shared, "-x", "c", str(NATIVE / "nvml.c"), f"-Wl,-soname,{NVML}", "-o", str(out / NVML)]
    for command in (extension, nvml):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"The virtual card could not be built:\n{' '.join(command)}\n{done.stderr}")
