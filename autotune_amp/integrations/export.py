"""A config as text for a training framework: pure, and without importing the framework."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations import deepspeed, export_texts
from autotune_amp.integrations.export_script import Setting, environment_lines, wrapped

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Recommendation

Target: TypeAlias = Literal["lightning", "transformers", "accelerate", "deepspeed", "torch", "env"]
TARGETS: tuple[Target, ...] = ("lightning", "transformers", "accelerate", "deepspeed", "torch", "env")
_TEXTS = {
    "accelerate": export_texts.accelerate,
    "lightning": export_texts.lightning,
    "torch": export_texts.torch,
    "transformers": export_texts.transformers,
}
_MARK = "autotune-amp export of"  # begins a text's first line, which says where it comes from
_STEPPING = ("lightning", "transformers", "deepspeed")  # their trainers and engines take the training steps


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """The text for one target, as a JSON document with `format`.

    `notes` say where the config comes from, and what it holds that the text has no room for; a text that can hold
    comments has it there. A launch file that needs more than a plain Accelerator says so in both.
    """

    format: int = 1
    to: Target
    text: str
    notes: tuple[str, ...] = ()


def setting_of(recommendation: Recommendation, origin: str) -> Setting:
    """What of a recommendation a text is made from; `origin` is a line that says where it comes from."""
    evidence, workload = recommendation.evidence, recommendation.workload
    accumulation = evidence.accumulation
    verdict = None if accumulation is None else accumulation.verdict
    counted = None if accumulation is None else accumulation.weighted_by
    return Setting(
        recommendation.config,
        recommendation.hardware.identity.type,
        loss="sum" if verdict == "sum" else "weighted" if verdict == "weighted" else "mean",
        share="what the loss is a mean over" if counted is None else f"({counted})",
        is_loop=workload is not None and workload.is_loop,
        origin=origin,
    )


def export(setting: Setting, to: str) -> Export:
    """The text for the target named `to`.

    Raises `InvalidRequestError` for a name that is none of `TARGETS`, and for what the framework cannot train at all.
    """
    target = next((name for name in TARGETS if name == to), None)
    if target is None:
        raise InvalidRequestError(f"There is no export to {to!r}.", f"Name one of {', '.join(TARGETS)}.")
    if target == "env":
        lines = environment_lines(setting.config.environment) or ["# The config sets no environment variables."]
        return Export(to=target, text=_headed(setting, "\n".join(lines) + "\n"))
    if setting.config.precision == "fp8":
        raise InvalidRequestError("There is no export of fp8.", "Export a config in bf16, fp16, tf32 or fp32.")
    if setting.is_loop and target in _STEPPING:
        raise InvalidRequestError(
            f"There is no export to {target} of a training with a train_step of its own: {target} takes the steps.",
            "Export it with --to torch or --to accelerate, which call train_step(state, batch, amp).",
        )
    if target == "deepspeed":
        document = json.dumps(deepspeed.deepspeed_config(setting.config), indent=2)
        origin = [f"{setting.origin}."] if setting.origin else []
        notes = (*origin, *deepspeed.unheld(setting.config), *setting.divided_by("DeepSpeed"))
        return Export(to=target, text=f"{document}\n", notes=notes)
    return Export(to=target, text=_headed(setting, _TEXTS[target](setting)))


def accelerate_file(setting: Setting) -> Export:
    """The file that ``accelerate launch --config_file`` reads; its comments say what belongs to the script.

    Raises `InvalidRequestError` for fp8.
    """
    notes = export_texts.needs_of_launched(setting)
    return Export(to="accelerate", text=_headed(setting, export_texts.accelerate_file(setting)), notes=tuple(notes))


def is_exported(text: str) -> bool:
    """Whether a file with this text was written by an export: its first line says so.

    DeepSpeed's JSON has no room for that line; it is one where it holds the exported keys and no others.
    """
    if text.startswith(f"# {_MARK}"):
        return True
    try:
        document = json.loads(text)
    except ValueError:
        return False
    keys = deepspeed.deepspeed_config(AmpConfig(precision="fp32", batch_size=1)).keys()
    return isinstance(document, dict) and document.keys() == keys


def _headed(setting: Setting, text: str) -> str:
    origin = wrapped(f"{_MARK} {setting.origin}") if setting.origin else []
    return "".join(f"{line}\n" for line in origin) + text
