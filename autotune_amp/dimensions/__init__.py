"""Dimensions: one file for each thing that a setting decides, with what a search, a trial and an export do with it.

By default a search also tries the variants that this model and device support and that do no harm: `torch.compile`,
the memory format of convolutions, the optimizer's fused or foreach step; if memory is too small for a larger batch,
checkpointed blocks and CUDA's `expandable_segments`; and fp8 on GPUs that have it. First the leading setting's step is
profiled, which takes a second or two (and is left out if it would take a twentieth of the budget): the profile bounds
the gain of each variant, and so decides their order. Each is tried once, on the leading setting, kept if it is 3 %
faster, and the next is tried on top of it; then the neighbouring batch sizes. The winner is compared with fp32 as it
will run (compiled if it is compiled), and confirmed as a whole. All of it takes at most three tenths of the budget;
variants that cannot pay off are not tried: an optimizer that takes less than 3 % of a step, a compilation that takes
longer than `--steps` steps could gain. The table *also tried* has a row for each: its gain and the profile's bound, the
change in memory, the number of graph breaks, the steps after which compiling pays off, or the reason why it was not
tried. If there is nothing to gain, two searches took 1.13 and 1.63 times as long with it (`studies/variants`; a useless
compilation takes 11 to 68 s on two slow CPU cores): `--try none` turns it off.

In your script, `prepare` applies the recommendation's variants to live objects, with the code that the trials ran:

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

The names in a `state_dict` do not change, without `_orig_mod.`, so checkpoints load with and without it. bf16
weights are tried only on request (`--try weights`): small updates round away on them, which the check counts.
`cudnn_benchmark` (`torch.backends.cudnn.benchmark = True`) is tried if a model has convolutions and all its batches
have one shape. The allocator's setting is in `autotune-amp export --to env` too, for the whole process. A command can
set only its placeholders; no variant is tried on it.

In plain PyTorch the variants are `model.compile(...)` (`prepare` also compiles a bare `nn.Sequential`, which that
ignores before torch 2.15), `model.to(memory_format=...)` and a comment for the optimizer. In frameworks:

* Transformers: `torch_compile`, `activation_checkpointing`, `optim="adamw_torch_fused"`, for fp8 `bf16`;
  `AutotuneTrainer` sets up the rest.
* Lightning: `AutotunePrecision` sets them up; of a `LightningModule` the parts that `training_step` calls are
  compiled.
* Accelerate: a line with `prepare` in the script; `accelerate_config` has the keys of the dynamo plugin.
* DeepSpeed: a note, since its engine makes the optimizer and the weights itself.

**fp8.** `AmpConfig(precision="fp8")` is bf16 autocast in which linear layers multiply in fp8, by torchao: all but
the first and the last, if their sizes are multiples of 16. Their weights stay in fp32 and the names in a `state_dict`
do not change. fp8 is tried compiled, by both of torchao's recipes (`fp8_recipe`: a scale per row or per
tensor), on the best setting otherwise, and compared with fp32 like every other precision; `check_fidelity(target,
precision="fp8")` runs that check alone, emulated without such a GPU. The controller needs `attach(model)`;
stepping down to bf16 restores the plain layers over the same parameters. Both recipes
have trained on an H200; their gain there was not measured.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from autotune_amp.core.setting import Setting
from autotune_amp.dimensions.activation_checkpointing import ACTIVATION_CHECKPOINTING
from autotune_amp.dimensions.allocator import ALLOCATOR
from autotune_amp.dimensions.batch_size import ACCUMULATION_STEPS, BATCH_SIZE
from autotune_amp.dimensions.compile import COMPILE
from autotune_amp.dimensions.cudnn_benchmark import CUDNN_BENCHMARK
from autotune_amp.dimensions.dimension import Dimension, Variant
from autotune_amp.dimensions.fp8_recipe import FP8_RECIPE
from autotune_amp.dimensions.memory_format import MEMORY_FORMAT
from autotune_amp.dimensions.num_workers import NUM_WORKERS
from autotune_amp.dimensions.optimizer_impl import OPTIMIZER_IMPL
from autotune_amp.dimensions.pinned_modules import PINNED_MODULES
from autotune_amp.dimensions.precision import AS_FOUND, PRECISION
from autotune_amp.dimensions.weights import WEIGHTS

__all__ = [
    "ACCUMULATION_STEPS",
    "ACTIVATION_CHECKPOINTING",
    "ALLOCATOR",
    "AS_FOUND",
    "BATCH_SIZE",
    "COMPILE",
    "CUDNN_BENCHMARK",
    "FP8_RECIPE",
    "MEMORY_FORMAT",
    "NUM_WORKERS",
    "OPTIMIZER_IMPL",
    "PINNED_MODULES",
    "PRECISION",
    "WEIGHTS",
]

# One for each field of `Setting`; risks are compared in this order. The tests hold both to the same order.
DIMENSIONS: Final[tuple[Dimension[Any], ...]] = (
    PRECISION,
    BATCH_SIZE,
    ACCUMULATION_STEPS,
    AS_FOUND,
    PINNED_MODULES,
    NUM_WORKERS,
    ALLOCATOR,
    WEIGHTS,
    MEMORY_FORMAT,
    CUDNN_BENCHMARK,
    FP8_RECIPE,
    ACTIVATION_CHECKPOINTING,
    OPTIMIZER_IMPL,
    COMPILE,
)
BY_NAME: Final = {dimension.name: dimension for dimension in DIMENSIONS}
VARIANTS: Final = {dimension.name: dimension for dimension in DIMENSIONS if isinstance(dimension, Variant)}
NUMERIC: Final = tuple(dimension.name for dimension in DIMENSIONS if "numerics" in dimension.affects)
# Order without a profile: values that cost only a trial come before those that compile. Nothing is tried on top of
# low-precision weights, which few checks find faithful.
_ORDER = (
    MEMORY_FORMAT,
    CUDNN_BENCHMARK,
    OPTIMIZER_IMPL,
    COMPILE,
    FP8_RECIPE,
    ALLOCATOR,
    ACTIVATION_CHECKPOINTING,
    WEIGHTS,
)
TRIED_ON_LEADER: Final = (
    *(dimension for dimension in DIMENSIONS if dimension.found_by == "variants" and dimension not in _ORDER),
    *_ORDER,
)


def numerics_of(setting: Setting) -> Setting:
    """Return the setting reduced to the dimensions that affect numerics; equal results compute the same numbers."""
    return replace(setting.ordinary, **{name: getattr(setting, name) for name in NUMERIC})


def risks(setting: Setting) -> tuple[int, ...]:
    """Return the risk of each dimension's value; among settings of similar speed the least tuple wins."""
    return tuple(dimension.risk(getattr(setting, dimension.name)) for dimension in DIMENSIONS)


def fallback_setting(setting: Setting) -> Setting:
    """Return the setting without the dimensions that a fallback plan leaves out."""
    return replace(setting, **{d.name: d.default for d in DIMENSIONS if d.left_out_of_fallbacks})
