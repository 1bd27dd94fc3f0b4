"""Agent inside the processes of a training command: observes their optimizer steps and sends messages to the parent.

``path/sitecustomize.py`` loads it under the name ``autotune_amp_agent``. It uses Python's standard library alone, 3.8
and newer, since the user's environment may not have our dependencies; torch is available once the user's program has
imported it. The modules in the order of events: `channel`, `imports`, `observer`, and those that the observer uses:
`batches`, `passes`, `where`.
"""

from __future__ import annotations

import json
import os
from typing import Any


def arm(settings_text: str) -> None:
    """Start the agent in this process: send `Hello` and guard existing files now, turn off experiment trackers, and
    observe the training once torch is imported.

    `settings_text` is a JSON object. ``socket``: path of the parent's socket; ``folder``: the trial's own folder;
    ``guard``: arguments of `guard.arm`, if existing files are guarded; ``observes``: false to patch nothing for
    observing; ``frozen``: settings of `frozen.GradientRecorder`, which replaces optimizer steps; ``diagnosis``:
    settings of `diagnosis.StepDiagnosis`, which examines some steps; ``outside``: values to set without a placeholder;
    ``is_held``: whether to wait before training until the parent asks to go on;
    ``seed``: of the random number generators; ``overlay``: edited copies to run in place of files; ``sites``: whether
    to report the calls in the user's code that made training objects. Without a socket this is the real training run:
    see `real`.
    """
    from . import trackers
    from .channel import Channel
    from .imports import after_import

    settings: dict[str, Any] = json.loads(settings_text)
    if "socket" not in settings:

        def install_settings(_: Any) -> None:
            from . import real

            real.install(settings)

        after_import("torch", install_settings)
        return
    channel = Channel(settings["socket"])
    channel.send("hello")
    try:
        trackers.turn_off(channel)
        if settings.get("guard"):
            from . import guard

            guard.arm(channel, **settings["guard"])

        if settings.get("overlay"):
            from . import overlay

            overlay.arm(settings["overlay"])
    except Exception as error:
        channel.send_error(error, is_of_agent=True)
        os._exit(1)  # nothing protects the user's files in this process

    def install_observer(_: Any) -> None:
        from . import observer

        observer.install(channel, settings)

    after_import("torch", channel.shield(install_observer))
