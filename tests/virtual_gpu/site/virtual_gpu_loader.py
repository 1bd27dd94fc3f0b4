"""Loads the virtual card around the import of torch.

torch makes its CUDA hooks once, while it is imported, so the extension must be loaded before; the functions of
torch.cuda are replaced after it. Nothing here imports torch: processes that do without it stay as fast.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import named_cards

if TYPE_CHECKING:
    from collections.abc import Sequence

# The machine where nothing else is asked for. A context of a real card takes 300 to 500 MiB.
DEFAULTS = {
    "VIRTUAL_GPU_NUM": "1",
    "VIRTUAL_GPU_MIB": "8192",
    "VIRTUAL_GPU_CC": "8.0",
    "VIRTUAL_GPU_NAME": "Virtual GPU",
    "VIRTUAL_GPU_CONTEXT_MIB": "500",
    "VIRTUAL_GPU_THROTTLE": "0",
}


def await_torch() -> None:
    """Makes NVML answer at once, and CUDA as soon as torch is imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if card := os.environ.get("VIRTUAL_GPU_CARD"):
        os.environ.update(named_cards.CARDS[card].variables())
        time.perf_counter = _host_seconds
        time.perf_counter_ns = lambda: round(1e9 * _host_seconds())
    built = Path(os.environ["VIRTUAL_GPU"])
    # By its SONAME the loader gives this one to whoever asks for NVML later.
    ctypes.CDLL(str(built / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, _TorchFinder(built))


def _host_seconds() -> float:
    """By the virtual clock, which stands still until torch is there."""
    native = sys.modules.get("virtual_gpu_native")
    seconds: float = native.host_seconds() if native else 0.0
    return seconds


class _TorchFinder(MetaPathFinder):
    def __init__(self, built: Path) -> None:
        self._built = built

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name)
        if spec is None or spec.loader is None or spec.origin is None:
            return None
        libraries = Path(spec.origin).parent / "lib"
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            ctypes.CDLL(str(libraries / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(self._built / "virtual_gpu_native.so"))
            execute(module)
            # pytest's workers get another path than they were started with.
            sys.path[:0] = [str(self._built), str(Path(__file__).parent)]
            import virtual_cuda

            virtual_cuda.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
