"""The searches of this study: a workload of studies/landscapes and what is asked of the command line."""

from __future__ import annotations

from typing import Literal, NamedTuple

# When another process loads a core: during search and trainings, during the search alone, or from the moment on that
# the confirmation has begun.
Load = Literal["throughout", "search", "from confirmation"]

# Three rounds of confirmation fit into these on this machine, where a fresh process takes 6 to 7 s in all, 9 to 10 with
# transformers.
DEFAULT_BUDGET_SECONDS, TRANSFORMERS_BUDGET_SECONDS = 140, 200
FREE = ("--effective-batch-size", "free")


class Case(NamedTuple):
    """`options` are those of the command line; `load` is when the loaded run keeps a core busy."""

    id: str
    workload: str
    options: tuple[str, ...] = ()
    load: Load = "throughout"

    @property
    def budget_seconds(self) -> int:
        return TRANSFORMERS_BUDGET_SECONDS if self.workload in ("gpt2", "vit") else DEFAULT_BUDGET_SECONDS


CASES = (
    Case("mlp", "mlp"),
    Case("mlp_free", "mlp", (*FREE, "--seed", "1"), "search"),
    Case("mlp_bf16", "mlp", ("--precision", "bf16"), "search"),
    Case("convnet", "convnet"),
    Case("convnet_free", "convnet", (*FREE, "--seed", "2"), "from confirmation"),
    Case("convnet_baseline", "convnet", ("--baseline", "bf16:128"), "search"),
    Case("channels_last", "convnet_channels_last", load="search"),
    Case("channels_last_free", "convnet_channels_last", (*FREE, "--seed", "3"), "from confirmation"),
    Case("transformer_small", "transformer_small", load="from confirmation"),
    Case("transformer_small_free", "transformer_small", (*FREE, "--seed", "4")),
    Case("transformer_medium", "transformer_medium"),
    Case("transformer_medium_wall", "transformer_medium", (*FREE, "--memory-fraction", "0.015"), "search"),
    Case("lstm", "lstm"),
    Case("lstm_free", "lstm", (*FREE, "--seed", "5"), "search"),
    Case("lstm_memory", "lstm", ("--objective", "memory", "--seed", "6"), "from confirmation"),
    Case("gpt2", "gpt2"),
    Case("gpt2_free", "gpt2", (*FREE, "--seed", "7"), "search"),
    Case("vit", "vit"),
    Case("vit_wall", "vit", (*FREE, "--memory-fraction", "0.028"), "from confirmation"),
    Case("vit_memory", "vit", ("--objective", "memory", "--seed", "8"), "search"),
)
