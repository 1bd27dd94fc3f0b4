"""Runs a command on a virtual machine: python tests/virtual_gpu/with_virtual_gpu.py autotune-amp probe."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import virtual_gpu_build

if reason := virtual_gpu_build.why_not():
    sys.exit(reason)
with tempfile.TemporaryDirectory() as folder:
    variables = virtual_gpu_build.environment(virtual_gpu_build.build(), Path(folder) / "ledger")
    sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, **variables}).returncode)
