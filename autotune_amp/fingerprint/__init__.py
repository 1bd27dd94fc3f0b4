"""Fingerprint of a search: the conditions under which its recommendation stays valid, without running the user's code.

No factory is called, and no method of a user's class: objects are read through their dictionaries and slots. The
fingerprint covers: the user's source files of all functions and classes that are reached, and the files that they
import; present code, defaults, closures and globals; settings, shapes and dtypes of live objects; versions of
libraries. It does not cover values of tensors, states of random generators and the working directory. Objects that
Python itself cannot pickle (a lock, an open file, a generator) have no comparable content; they are listed as unknown.

Not detected: files that a factory opens, attributes looked up by a computed name, functions assigned to a library's
modules and classes, environment variables whose name is not written in the code.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import msgspec

from autotune_amp import __version__
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.distributed import is_from_launcher
from autotune_amp.fingerprint.objects import Walk, attributes_of, is_a
from autotune_amp.fingerprint.source import short_hex, version

if TYPE_CHECKING:
    from autotune_amp.core.hardware import DeviceIdentity

# Environment variables that affect the allocator, the threads and the kernels: names or prefixes.
_DECIDING = (
    *("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_"),
    *("TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_OVERRIDE"),
)
# Variables set by us in child processes, by torch, its compiler and scikit-learn in the running process, or by Slurm
# for each job; devices have their own parts. The location of files does not affect speed.
_SET_BY_PROGRAMS = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_CACHE_PATH", "TORCH_HOME"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK"),
    "KMP_INIT_AT_FORK",
)


def versions() -> dict[str, str]:
    """Return the versions that a measurement depends on. Imports nothing: `cuda` is there only if torch is loaded."""
    torch: Any = sys.modules.get("torch")
    found = {
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "torch": version("torch"),
        "autotune_amp": __version__,
        "optuna": version("optuna"),
        "torchao": version("torchao"),
        "cuda": None if torch is None else torch.version.cuda,
    }
    return {name: known for name, known in found.items() if known is not None}


def compute(
    workload: object, options: dict[str, object], identity: DeviceIdentity, torch_state: dict[str, object]
) -> Fingerprint:
    """Return the fingerprint of a search: workload, options, device, torch flags, environment and versions.

    Runs no code of the user.
    """
    parts, unknown = workload_parts(workload)
    set_by_programs = tuple(f"environment variable {name}" for name in _SET_BY_PROGRAMS)
    parts = {name: part for name, part in parts.items() if not name.startswith(set_by_programs)}
    groups = {"option": options, "device": msgspec.structs.asdict(identity), "torch flag": torch_state}
    for group, named in groups.items():
        parts |= {f"{group} {name}": _setting(value) for name, value in named.items()}
    parts |= {"platform" if name == "platform" else f"version of {name}": f"={v}" for name, v in versions().items()}
    for name, value in os.environ.items():
        if name.startswith(_DECIDING) and not (name.startswith(_SET_BY_PROGRAMS) or is_from_launcher(name)):
            parts[f"environment variable {name}"] = short_hex(Walk().value(value))
    content = msgspec.json.encode(sorted(parts.items()))
    return Fingerprint(digest=hashlib.sha256(content).hexdigest(), parts=parts, unknown=unknown)


def _setting(value: object) -> str:
    """Return `value` as text if it is short and not a URL, which may contain a password; otherwise its digest."""
    if value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and "://" not in value):
        shown = str(value)
        if len(shown) <= 60:
            return f"={shown}"
    return short_hex(Walk().value(value))


def workload_parts(workload: object) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return a digest for each part of a workload, by name, and descriptions of parts that cannot be compared.

    `workload` is an object with attributes, or a function that returns one and is not called. An example of a name is
    ``function loss of train.py``. A value with the prefix ``=`` is plain text, such as a library's version.
    """
    walk = Walk()
    if is_a(workload, FunctionType, BuiltinFunctionType, MethodType, type, partial):
        walk.part("workload", "workload", partial(walk.value, workload))
    else:
        walk.part("workload", "workload", partial(walk.value, type(workload)))
        for name, value in attributes_of(workload).items():
            walk.part(name, f"workload.{name}", partial(walk.value, value))
    walk.run()
    return walk.parts, tuple(walk.unknown)
