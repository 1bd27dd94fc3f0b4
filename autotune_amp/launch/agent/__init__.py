"""What runs inside the processes of a training command: it sees their optimizer steps and tells the parent.

It is brought in by ``path/sitecustomize.py`` under the name ``autotune_amp_agent``. Python's standard library alone,
3.8 and newer, since the user's environment may hold nothing of ours; torch is there once the user's program has
imported it. In the order in which things happen: `channel`, `imports`, `observer`, and what that one asks: `batches`,
`passes`, `where`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def arm(settings_text: str) -> None:
    """Start in a process: say so, and guard it at once; the rest when torch is imported.

    `settings_text` is a JSON object: ``socket`` the path of the parent's, ``folder`` the trial's own; ``guard``, what
    may be changed (see `guard.arm`), where files are guarded; ``observes``, false where nothing is to be patched for
    the sake of observing; ``frozen``, where no step is to be taken; ``outside``, what is to be set from outside;
    ``seed``; ``overlay``, files that are run as if they held the text of others; ``sites``, whether to tell of the
    calls of the user's own. Without a socket it is the real training: see `real`.
    """
    from .channel import Channel
    from .imports import after_import

    settings: dict[str, Any] = json.loads(settings_text)
    if "socket" not in settings:

        def set_from_outside(_: Any) -> None:
            from . import real

            real.install(settings)

        after_import("torch", set_from_outside)
        return
    channel = Channel(settings["socket"])
    channel.send("hello", parent_pid=os.getppid(), python=".".join(map(str, sys.version_info[:3])))
    if settings.get("guard"):
        from . import guard

        guard.arm(channel, **settings["guard"])

    if settings.get("overlay"):
        from . import overlay

        overlay.arm(settings["overlay"])

    def with_torch(_: Any) -> None:
        from . import observer

        observer.install(channel, settings)

    after_import("torch", channel.shield(with_torch))
