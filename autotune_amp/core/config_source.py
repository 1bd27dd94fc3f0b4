"""Of a config, the lines of Python that every text to copy has: in the terminal, the report and the exports. Pure."""

from __future__ import annotations

import shlex
from typing import Literal

from autotune_amp.core.config import AmpConfig, Precision

AUTOCAST_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
LOSS = "compute_loss(model, batch)"
LOADER_COMMENT = "# Your loader's other arguments stay: shuffle, collate_fn, drop_last, ..."


def strict_flag_lines(precision: Precision) -> list[str]:
    """Of `torch_state.set_flags` what matters on CUDA."""
    is_tf32 = precision == "tf32"
    return [
        f'torch.set_float32_matmul_precision("{"high" if is_tf32 else "highest"}")',
        f"torch.backends.cudnn.allow_tf32 = {is_tf32}",
    ]


def export_lines(config: AmpConfig) -> list[str]:
    """The shell line that sets the environment the config was measured in; empty where there is nothing to set."""
    if not config.environment:
        return []
    return ["export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in config.environment.items())]


def loader_line(config: AmpConfig) -> str:
    """The user's loader with what the config decides of it."""
    workers = "" if config.num_workers is None else f", num_workers={config.num_workers}"
    return f"loader = DataLoader(dataset, batch_size={config.batch_size}{workers})"


def accumulates(config: AmpConfig) -> bool:
    """Whether the config or one of its fallback plans does."""
    return max([config.accumulation_steps, *(plan.accumulation_steps for plan in config.plans)]) > 1


def pass_loss(combination: Literal["mean", "sum", "weighted"], steps: str, share: str) -> str:
    """The expression for a pass's part of its window's loss.

    `steps` and `share` are the source of the window's passes and of this one's part of what counts in it.
    """
    return {"mean": f"{LOSS} / {steps}", "sum": LOSS, "weighted": f"{LOSS} * {share}"}[combination]


def controlled_loop(windows: str, loss: str) -> list[str]:
    """The loop of a `controller`, over the arguments of its `windows` and with the expression for a pass's `loss`."""
    return [
        "controller.attach(model)",
        f"for batch, is_last in controller.windows({windows}):",
        "    with controller.autocast():",
        f"        loss = {loss}",
        "    controller.backward(loss)",
        "    if is_last:",
        "        controller.step(optimizer)",
        "        controller.update()",
        "        optimizer.zero_grad()",
    ]
