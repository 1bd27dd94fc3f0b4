"""Sick workloads: each is harmed in the precisions named, however the loss scale is set, and trains well elsewhere.

The last two are sick in their weights, whatever autocast does: what trains well there is fp32 weights.
"""

from __future__ import annotations

import zoo_sick_overflow as overflow
import zoo_sick_rounding as rounding
import zoo_sick_underflow as underflow
from case import Case

_FP16, _BOTH = ("fp16",), ("bf16", "fp16")

SICK: tuple[Case, ...] = (
    Case("t5_feed_forward", overflow.t5_feed_forward, _FP16, r"encoder\.block\.0\.layer\.1\b", is_healable=True),
    Case("gated_feed_forward", overflow.gated_feed_forward, _FP16, r"blocks\.1\.feed_forward\b", is_healable=True),
    Case(
        "growing_logits", overflow.growing_logits, _FP16, r"^head$", is_healable=True,
        note="in range at first: past 65504 after some ten steps",
    ),
    Case("squaring_norm", overflow.squaring_norm, _FP16, r"^norm$", is_healable=True, note="all finite"),
    Case("vanishing_eps", underflow.vanishing_eps, _FP16, r"^normalise$", is_healable=True),
    Case("log_of_tiny", underflow.log_of_tiny, _FP16, r"^log_probabilities$", is_healable=True),
    Case("summed_loss", overflow.summed_loss, _FP16, None, note="the loss function's own sum overflows"),
    Case(
        "quiet_branch", underflow.quiet_branch, _FP16, r"^quiet\b", is_healable=True,
        note="the whole gradient's direction hides it; each parameter's shows it",
    ),
    Case("tiny_cosine", underflow.tiny_cosine, _FP16, r"^similarity$", is_healable=True),
    Case("fully_masked_rows", overflow.fully_masked_rows, _FP16, r"^attention\b", is_healable=True),
    Case("running_sum", rounding.running_sum, _BOTH, r"^level$", is_healable=True),
    Case("large_offset", rounding.large_offset, _BOTH, r"^raw_input$", is_healable=True),
    Case("calendar", rounding.calendar, ("bf16",), r"^calendar\b", is_healable=True, note="integers up to 2000"),
    Case("variance_of_moments", rounding.variance_of_moments, _BOTH, r"^norm$", is_healable=True),
    Case("one_minus_probability", rounding.one_minus_probability, _BOTH, r"^entropy$", is_healable=True),
    Case("bf16_weights", rounding.bf16_weights, ("fp32", "bf16", "fp16"), None, note="bf16 whatever autocast does"),
    Case(
        "fp16_weights", rounding.fp16_weights, ("fp32", "bf16"), None, is_unsupported_in=("fp16",),
        note="fp16 whatever autocast does; under fp16 GradScaler raises: it refuses to unscale fp16 gradients",
    ),
)  # fmt: skip
