"""What a recommendation holds for, known without running anything of the user's.

No factory is called, and no method of a user's class: objects are read through their dictionaries and slots. What
counts: the user's source files that the functions and classes reached stand in, and those that they import; code,
defaults, closures and globals as they are now; settings, shapes and dtypes of live objects; versions of libraries. What
does not: values of tensors, states of random generators, the working directory. What Python itself cannot pickle (a
lock, an open file, a generator) has no content that could be compared; it is named among the unknown.

Not seen: files that a factory opens, attributes looked up by a computed name, functions put into a library's modules
and classes, environment variables whose name is not written in the code.
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

# Environment variables that decide the allocator, the threads and the kernels: a name, or how names begin.
_DECIDING = (
    *("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_"),
    *("TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_OVERRIDE"),
)
# Set by us in children, by torch, its compiler and scikit-learn in the running process, by Slurm for each job: the
# device has its own parts. Where files lie decides no speed.
_SET_BY_PROGRAMS = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_CACHE_PATH", "TORCH_HOME"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK"),
    "KMP_INIT_AT_FORK",
)


def versions() -> dict[str, str]:
    """The versions a measurement depends on. Imports nothing: `cuda` is there only where torch is loaded and has it."""
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
    """The fingerprint of a search: workload, options, device, torch flags, environment and versions.

    Runs nothing of the user's.
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
    """Shown as it is where it is short; a URL may hold a password."""
    if value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and "://" not in value):
        shown = str(value)
        if len(shown) <= 60:
            return f"={shown}"
    return short_hex(Walk().value(value))


def workload_parts(workload: object) -> tuple[dict[str, str], tuple[str, ...]]:
    """What makes the workload: a digest by part name, and what of it cannot be known (empty: everything can).

    `workload` is an object with attributes, or a function that returns one and is not called. A name is such as
    ``function loss of train.py``. A value that begins with ``=`` is the thing itself, a library's version.
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
