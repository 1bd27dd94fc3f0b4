"""Stand-in for sitecustomize in every Python process that a trial's command starts: runs the sitecustomize that it
shadows, then loads the agent.

The order matters: an entry that the shadowed module adds to Python's import machinery must not hide torch from the
agent. Nothing of this folder stays on ``sys.path``; Python processes started from this one find it by ``PYTHONPATH``
again.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]


def _arm() -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    folder = os.path.dirname(_HERE)
    spec = spec_from_file_location(
        "autotune_amp_agent", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    agent = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(agent)
    agent.arm(os.environ["AUTOTUNE_AMP_AGENT"])


def _run_the_shadowed_one() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


try:
    _run_the_shadowed_one()
finally:
    if "AUTOTUNE_AMP_AGENT" in os.environ and sys.version_info >= (3, 8):
        try:
            _arm()
        except Exception:  # the user's program runs, whatever becomes of us; without a guard it is not reached
            import traceback

            sys.stderr.write("autotune-amp: its agent could not be started in this process\n")
            traceback.print_exc()
