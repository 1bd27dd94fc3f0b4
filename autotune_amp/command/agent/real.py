"""Real training run, set from outside: nothing is observed, and one line reports what was set and where."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from . import where
from .imports import after_import
from .outside import Outside
from .passes import NUM_FULLY_WATCHED, Passes

_WORDS = {"batch_size": "batch size", "accumulation_steps": "accumulation"}


def install(settings: dict[str, Any]) -> None:
    """Install the hooks that set values from outside; torch has just been imported.

    `settings` has ``outside`` (the values) and ``controller``: the path of the recommendation that a controller in
    GradScaler's place is made from, and the type of its device.
    """
    said = _Said(settings["outside"])
    passes = Passes(said)  # type: ignore[arg-type]
    outside = Outside(said, passes, settings["outside"], functools.partial(_controller, said, **settings["controller"]))
    outside.install()
    if "precision" in outside.values:
        passes.watch_modules()

    num_steps = 0

    def stepped(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == NUM_FULLY_WATCHED:  # as in a trial: a second model may train later
            hooks.pop().remove()
            passes.unwatch_modules()
            said.say()

    hooks = [register_optimizer_step_post_hook(stepped)]

    def with_dynamo(dynamo: Any) -> None:  # if `optimizer.step` is compiled, the hook is called between two graphs
        if hooks:
            hooks.pop().remove()
            hooks.append(register_optimizer_step_post_hook(dynamo.disable(stepped)))

    after_import("torch._dynamo", with_dynamo)
    atexit.register(said.say, at_exit=True)


class _Said:
    """Stand-in for the channel that collects what was set, until it is printed."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._asked = asked
        self._set: list[dict[str, Any]] = []
        self._problems: list[str] = []
        self._has_said = False
        self._pid = os.getpid()

    def add(self, event: str, **fields: Any) -> None:
        """Keep an event that reports a value that was set."""
        if event == "set":
            self._set.append(fields)

    def problem(self, text: str) -> None:
        """Keep the description of a problem."""
        self._problems.append(text)

    def shield(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """Return `action` wrapped so that it raises nothing into the user's program: its errors are printed."""

        @functools.wraps(action)
        def shielded(*args: Any, **kwargs: Any) -> Any:
            try:
                return action(*args, **kwargs)
            except Exception:
                traceback.print_exc()

        return shielded

    def say(self, *, at_exit: bool = False) -> None:
        """Print the line once, in the first rank. At exit, print it only if something was set."""
        is_ours = os.getpid() == self._pid and where.rank()["rank"] == 0 and not self._has_said
        if not is_ours or (at_exit and not self._set):
            return
        self._has_said = True
        parts = [*map(_text, self._set), *self._missing(), *self._problems]
        ending = " (it ends without an optimizer step of torch's)" if at_exit else ""
        text = "; ".join(parts) or "nothing was to be set"
        sys.stderr.write(f"autotune-amp: {text}{ending}\n")

    def _missing(self) -> list[str]:
        done = {fields["name"] for fields in self._set}
        missing = []
        for name, why in (
            (
                "batch_size",
                f"no DataLoader was made at {self._asked.get('maker') or 'a line of the script, to shuffle'}",
            ),
            ("accumulation_steps", "no framework was seen that accumulates"),
            ("precision", "no GradScaler was seen" if self._asked.get("precision") == "fp16" else "no module was seen"),
        ):
            wanted = self._asked.get(name)
            is_there = name == "precision" and wanted in ("fp32", "tf32")  # nothing lower was seen to undo
            if wanted is not None and name not in done and not is_there:
                missing.append(f"NOT set: {_WORDS.get(name, name)} {wanted}, since {why}")
        return missing


def _text(fields: dict[str, Any]) -> str:
    name, was = fields["name"], fields["was"]
    before = "" if was is None or was == fields["value"] else f" (was {was})"
    word = f"{_WORDS[name]} " if name in _WORDS else ""
    path, _, line = fields["line"].rpartition(":")
    at = f" at {os.path.relpath(path)}:{line}" if path else ""
    return f"{word}{fields['value']}{before} in {fields['what']}{at}"


def _controller(said: _Said, scaler: Any, *, path: str, device: str) -> Any:
    """Return the controller that the script's scaler is turned into, None if it stays a GradScaler."""
    own, attributes = type(scaler), dict(scaler.__dict__)
    try:
        from autotune_amp import PrecisionController, Recommendation

        config = Recommendation.load(path).config
        scaler.__dict__.clear()
        scaler.__class__ = PrecisionController
        PrecisionController.__init__(scaler, config, device)
    except Exception as error:
        scaler.__class__ = own
        scaler.__dict__.clear()
        scaler.__dict__.update(attributes)
        said.problem(f"GradScaler stays, since it cannot become a controller: {error}")
        return None
    return scaler
