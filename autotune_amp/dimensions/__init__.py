"""Dimensions: one file for each field of a setting, with its values and its effect on search, trial and export.

By default a search also tries the variants that this model and device support: `torch.compile`, the memory format of
convolutions, the optimizer's fused or foreach step; if memory is too small for a larger batch, activation checkpointing
and CUDA's `expandable_segments`; and fp8 on GPUs that support it. First a step of the leading setting is profiled, in a
second or two (unless that takes a twentieth of the budget). The profile bounds the gain of each variant, and they are
tried in that order. Each is tried once on the leading setting and kept if it is 3 % faster; the next is tried on top of
it; then the neighbouring batch sizes. The winner is compared with fp32 as it will run, for example compiled, and
confirmed as a whole. Together this takes at most three tenths of the budget. Variants that cannot pay off are not
tried: the optimizer's step if it takes less than 3 % of a training step, or a compilation that takes longer than
`--steps` steps could gain. The table *also tried* has a row for each variant: its gain and the profile's bound, the
change in memory, the number of graph breaks, the steps after which compiling pays off, or the reason why it was not
tried. `--try none` turns variants off. Where they gained nothing, two searches took 1.13 and 1.63 times as long with
them (`studies/variants`; a useless compilation takes 11 to 68 s on two slow CPU cores).

In your script, `prepare` applies the recommendation's variants to your model and optimizer, as the trials did:

```python
import torch
from torch import nn
from autotune_amp import AmpConfig, prepare

model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
model(torch.randn(2, 3, 8, 8))
optimizer = torch.optim.AdamW(model.parameters())
config = AmpConfig(
    precision="fp32", batch_size=32, memory_format="channels_last", optimizer_impl="fused"
)  # recommendation.config
model, optimizer = prepare(config, model, optimizer)  # the same objects; call it before DistributedDataParallel
print(model[0].weight.is_contiguous(memory_format=torch.channels_last), optimizer.param_groups[0]["fused"])
```

The loader's measured arguments are `config.loader_options`: `DataLoader(dataset, **config.loader_options, ...)`.
They have `pin_memory` if pinned memory, tried on a CUDA device, gained 3 %, and `prefetch_factor` if four batches a
worker did, tried where steps wait for the loader. All others of your loader were measured as they are, so keep them.

The names in a `state_dict` do not change (no `_orig_mod.`), so checkpoints load with and without `prepare`. bf16
weights are tried only on request (`--try weights`), since small updates round away on them; the fidelity check counts
these. `cudnn_benchmark` (`torch.backends.cudnn.benchmark = True`) is tried if a model has convolutions and all its
batches have one shape. `attention` (flash, efficient, math, cudnn) is the backend of PyTorch that computes
`scaled_dot_product_attention`, tried where a module of the model calls it. A trial allows only that backend, so one
that does not support a call (its mask, its head size, its precision) fails with PyTorch's reason; `prepare` prefers it
in the process and leaves the others for such calls. `autotune-amp export --to env` also contains the allocator's
setting. On a command only its own placeholders are tried, among them any that you write for an argument of yours, such
as `{attn=sdpa:eager}` (`autotune_amp.command`).

`autotune-amp export --to torch` writes the variants as `model.compile(...)`, `model.to(memory_format=...)` and a
comment for the optimizer. (Before torch 2.15 `compile` ignores a bare `nn.Sequential`; `prepare` compiles it.) In
frameworks:

* Transformers: `torch_compile`, `activation_checkpointing`, `optim="adamw_torch_fused"`, for fp8 `bf16`;
  `AutotuneTrainer` sets up the other variants.
* Lightning: `AutotunePrecision` sets them up. Of a `LightningModule` the submodules that `training_step` calls are
  compiled.
* Accelerate: a line with `prepare` in the script.
* DeepSpeed: only a note, since its engine creates the optimizer and the weights.

**fp8.** `AmpConfig(precision="fp8")` is bf16 autocast in which linear layers multiply in fp8, by torchao: all but
the first and the last, if their sizes are multiples of 16. Their weights stay in fp32 and the names in a `state_dict`
do not change. fp8 is tried compiled on the best other setting, with both of torchao's recipes (`fp8_recipe`: a scale
per row or per tensor), and compared with fp32 like every other precision. `check_fidelity(target, precision="fp8")`
runs only that check, and emulates fp8 without such a GPU. The controller needs `attach(model)`; if it steps down to
bf16, the layers become plain ones with the same parameters. Both recipes have trained on an H200; their gain there was
not measured.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from autotune_amp.core.setting import Setting
from autotune_amp.dimensions.activation_checkpointing import ACTIVATION_CHECKPOINTING
from autotune_amp.dimensions.allocator import ALLOCATOR
from autotune_amp.dimensions.argument import ARGUMENTS
from autotune_amp.dimensions.attention import ATTENTION
from autotune_amp.dimensions.batch_size import ACCUMULATION_STEPS, BATCH_SIZE
from autotune_amp.dimensions.compile import COMPILE
from autotune_amp.dimensions.cudnn_benchmark import CUDNN_BENCHMARK
from autotune_amp.dimensions.dimension import Dimension, Variant
from autotune_amp.dimensions.fp8_recipe import FP8_RECIPE
from autotune_amp.dimensions.loader import NUM_WORKERS, PIN_MEMORY, PREFETCH_FACTOR
from autotune_amp.dimensions.memory_format import MEMORY_FORMAT
from autotune_amp.dimensions.optimizer_impl import OPTIMIZER_IMPL
from autotune_amp.dimensions.precision import AS_FOUND, PINNED_MODULES, PRECISION
from autotune_amp.dimensions.weights import WEIGHTS

__all__ = [
    "ACCUMULATION_STEPS",
    "ACTIVATION_CHECKPOINTING",
    "ALLOCATOR",
    "ARGUMENTS",
    "AS_FOUND",
    "ATTENTION",
    "BATCH_SIZE",
    "COMPILE",
    "CUDNN_BENCHMARK",
    "FP8_RECIPE",
    "MEMORY_FORMAT",
    "NUM_WORKERS",
    "OPTIMIZER_IMPL",
    "PINNED_MODULES",
    "PIN_MEMORY",
    "PRECISION",
    "PREFETCH_FACTOR",
    "WEIGHTS",
]

# One for each field of `Setting`, in the same order. Risks are compared in this order.
DIMENSIONS: Final[tuple[Dimension[Any], ...]] = (
    PRECISION,
    BATCH_SIZE,
    ACCUMULATION_STEPS,
    AS_FOUND,
    PINNED_MODULES,
    NUM_WORKERS,
    PIN_MEMORY,
    PREFETCH_FACTOR,
    ALLOCATOR,
    WEIGHTS,
    MEMORY_FORMAT,
    CUDNN_BENCHMARK,
    ATTENTION,
    FP8_RECIPE,
    ACTIVATION_CHECKPOINTING,
    OPTIMIZER_IMPL,
    COMPILE,
    ARGUMENTS,
)
BY_NAME: Final = {dimension.name: dimension for dimension in DIMENSIONS}
VARIANTS: Final = {dimension.name: dimension for dimension in DIMENSIONS if isinstance(dimension, Variant)}
NUMERIC: Final = tuple(dimension.name for dimension in DIMENSIONS if "numerics" in dimension.affects)
# Order in which variants are tried without a profile: quick trials before those that compile. Low-precision weights
# are last, since the fidelity check rarely passes them and other variants would be tried on top of them.
_ORDER_WITHOUT_PROFILE = (
    PIN_MEMORY,
    PREFETCH_FACTOR,
    MEMORY_FORMAT,
    CUDNN_BENCHMARK,
    ATTENTION,
    OPTIMIZER_IMPL,
    COMPILE,
    FP8_RECIPE,
    ALLOCATOR,
    ACTIVATION_CHECKPOINTING,
    WEIGHTS,
)
TRIED_ON_LEADER: Final = (
    *(
        dimension
        for dimension in DIMENSIONS
        if dimension.found_by == "variants" and dimension not in _ORDER_WITHOUT_PROFILE
    ),
    *_ORDER_WITHOUT_PROFILE,
)


def numerics_of(setting: Setting) -> Setting:
    """Return the setting with defaults for all dimensions that do not affect numerics.

    Settings for which the result is equal compute the same numbers.
    """
    values = {name: getattr(setting, name) for name in NUMERIC} | {"arguments": setting.numeric_arguments}
    return replace(setting.ordinary, **values)


def risks(setting: Setting) -> tuple[int, ...]:
    """Return the risk of each dimension's value. Among settings of similar speed the one with the least tuple wins."""
    return tuple(dimension.risk(getattr(setting, dimension.name)) for dimension in DIMENSIONS)


def fallback_setting(setting: Setting) -> Setting:
    """Return the setting with defaults for the dimensions that fallback plans leave out."""
    return replace(setting, **{d.name: d.default for d in DIMENSIONS if d.left_out_of_fallbacks})
