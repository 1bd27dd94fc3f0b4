"""Diagnosis of training steps in the script's own process, by code of `autotune_amp` outside of the agent."""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from typing import Any

from . import where
from .passes import before_update, parameters_of

# Module of the package that runs a diagnosis; the package is looked up in the script's own environment first, then in
# the folder that contains this agent.
_MODULE = "autotune_amp.trial.observed_steps"
_PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(where.HERE)))


class StepDiagnosis:
    """Diagnosis of the steps of rank 0 that follow the first `num_warmup_steps`, by the job in `settings`: its `kind`
    and `fields` (see `core.job.find_job`).

    Once the job is done, its result is sent, and this process waits until the parent ends it.
    """

    def __init__(self, channel: Any, observer: Any, settings: dict[str, Any]) -> None:
        self._channel = channel
        self._observer = observer
        self._settings = settings
        self._steps: Any = None  # an `observed_steps.DiagnosedSteps` once it has begun
        # The latest optimizer of these parameters, as a weak reference, with its line, and the index of the first one.
        self._latest: dict[frozenset[int], tuple[Any, str, int]] = {}
        self._first_of: dict[int, int] = {}  # index of the first one by that of an optimizer
        self._num_steps_of: dict[int, int] = {}  # by the index of the first one
        self._diagnosed = -1  # index of the first one of those that step least often, whose steps are diagnosed
        observer.loaders.keeps_latest = True

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Go on with a diagnosis that looks at gradients before the optimizer uses them; see `passes.before_update`."""
        first = self._first(optimizer)  # before the step, after which DeepSpeed takes its parameters away
        if self._steps is None or first != self._diagnosed:
            return None
        resume = self._channel.shield(self._steps.resume)
        return before_update(args, kwargs, lambda: resume("before step"), self._steps.in_closure)

    def after_step(self, optimizer: Any, step: dict[str, Any]) -> None:
        """Begin the diagnosis after the warm-up, and go on with it after each step.

        `step` are the fields of the `Step` message of the optimizer.
        """
        first = self._first(optimizer)
        if self._steps is not None:
            if first == self._diagnosed:
                self._steps.resume("after step")
            return
        num_steps = self._num_steps_of[first] = self._num_steps_of.get(first, 0) + 1
        least = min(self._num_steps_of.get(self._first(each), 0) for each in self._observer.live_optimizers())
        if num_steps < self._settings["num_warmup_steps"] or num_steps != least or where.rank()["rank"]:
            return
        if not bool(step["is_skipped"]):  # a GradScaler is still searching for its scale
            self._begin(first, step)

    def _first(self, optimizer: Any) -> int:
        """Return the index of the first optimizer of the same parameters: a script may make its optimizer anew for
        each round. The earlier one is gone then, or is of the same class and steps at the same line.
        """
        index = self._observer.index_of(optimizer)
        if index not in self._first_of:
            parameters = frozenset(map(id, parameters_of(optimizer)))
            line = where.user_line()
            reference, latest_line, first = self._latest.get(parameters, (lambda: None, "", index))
            latest = reference()
            if latest is not None and (type(latest), latest_line) != (type(optimizer), line):
                first = index  # both step in turn
            self._latest[parameters] = weakref.ref(optimizer), line, first
            self._first_of[index] = first
        return self._first_of[index]

    def _begin(self, first: int, step: dict[str, Any]) -> None:
        memory = self._observer.memory_fields()  # before this process loads code of ours
        sys.path.append(_PACKAGES)
        try:
            observed_steps = importlib.import_module(_MODULE)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._channel.send("diagnosed", result=None, problem=reason, python=sys.executable, **where.rank())
            self._channel.wait_for_end()
        finally:
            sys.path.remove(_PACKAGES)
        self._diagnosed = first
        self._steps = observed_steps.DiagnosedSteps(
            self._settings,
            self._observer,
            memory=memory,
            regions=step["regions"],
            num_ranks=where.rank()["world"],
            send=self._send,
        )

    def _send(self, result: str) -> None:
        """Send the result, a JSON document, and wait for the end of this process."""
        self._channel.send("diagnosed", result=result, problem="", python=sys.executable, **where.rank())
        self._channel.wait_for_end()
