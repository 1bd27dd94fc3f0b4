"""The further dimensions on live objects: what a model and an optimizer can have, and setting it up.

A search also tries, by itself, what this model and device can have and what does no harm: `torch.compile`, the
memory format of convolutions, the optimizer's fused or foreach step; where a larger batch lacks memory checkpointed
blocks and CUDA's `expandable_segments`; and fp8 on cards that have it. First the leading setting's step is
profiled, which takes a second or two (and is left out where it would take a twentieth of the budget): it says what
each may gain, so which to try first. Each is tried once, on the setting that leads so far, kept where it wins 3 %,
and the next is tried on top of it; then the batch sizes beside that. What wins is held against fp32 as it will run
(compiled is checked compiled), and confirmed as a whole. All of it has three tenths of the budget; what cannot pay
is not tried: an optimizer that takes less than 3 % of a step, a compilation that takes longer than `--steps` steps
could gain. The table *also tried* has a row for each: what it gained beside what the profile left it, what memory it
took, how often the compiler had to leave code to Python, after how many steps compiling has paid, or why not. Where
nothing is to gain, two searches took 1.13 and 1.63 times as long with it (`studies/variants`; a compilation in vain
takes 11 to 68 s on two slow CPU cores): `--try none` saves it.

In your script, `prepare` sets up on live objects what the recommendation says of them, by the code that the trials
ran:

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

The names in a `state_dict` stay what they were, without `_orig_mod.`, so checkpoints load with and without it. bf16
weights (`--try weights`) have to be asked for: small updates round away on them, which the check counts.
`cudnn_benchmark` (`torch.backends.cudnn.benchmark = True`) is tried where a model has convolutions and its batches
one shape. The allocator's setting is in `autotune-amp export --to env` too, for the whole process. A command's
settings are those that it has placeholders for; none of this is tried on it.

Beside plain PyTorch, where they are `model.compile(...)` (`prepare` compiles a bare `nn.Sequential` too, which that
leaves alone before torch 2.15), `model.to(memory_format=...)` and a comment for the optimizer, they are said as:

* Transformers: `torch_compile`, `activation_checkpointing`, `optim="adamw_torch_fused"`, for fp8 `bf16`;
  `AutotuneTrainer` sets up the rest.
* Lightning: `AutotunePrecision` sets it up; of a `LightningModule` its parts are compiled, which `training_step`
  calls.
* Accelerate: a line with `prepare` in the script; `accelerate_config` has the keys of the dynamo plugin.
* DeepSpeed: a note, since its engine makes the optimizer and the weights itself.

**fp8.** `AmpConfig(precision="fp8")` is bf16 autocast in which linear layers multiply in fp8, by torchao: all but
the first and the last whose sizes are multiples of 16. Their weights stay fp32 and the names in a `state_dict` what
they are. It is tried compiled, by both of torchao's recipes (`fp8_recipe`: a scale for each row, or for each
tensor), on what wins otherwise, and held against fp32 as every other precision; `check_fidelity(target,
precision="fp8")` does that alone, emulated where there is no such card. The controller needs `attach(model)`;
stepping down to bf16 puts the plain layers back over the same parameters. Both recipes
have trained on an H200; what they gain there was not measured.
"""
