#!/bin/sh
# The peers' environment, .venv beside this file, which run.py uses unless PEERS_PYTHON names another Python.
# On a machine without a GPU, torch first from its own index spares the CUDA libraries:
#   .venv/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
set -e
cd "$(dirname "$0")"
"${PYTHON:-python}" -m venv .venv
.venv/bin/pip install -r requirements.txt
