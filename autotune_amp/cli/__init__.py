"""Command line `autotune-amp`: the commands by subject, and `app`, which parses the options and runs a command.

Standard output has only the result; progress, notes and errors go to standard error.
"""

from autotune_amp.cli.app import main as main
from autotune_amp.cli.app import register
from autotune_amp.cli.app import run as run
from autotune_amp.cli.diagnostics import check, fidelity, memory, probe, profile
from autotune_amp.cli.results import dashboard, export, report, show
from autotune_amp.cli.serving import serve
from autotune_amp.cli.training import apply, run_, search

for function in (search, check, probe, show, report, profile, fidelity, memory, export, run_, apply, dashboard, serve):
    register(function)
