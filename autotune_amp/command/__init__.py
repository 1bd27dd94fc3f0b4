"""Training commands as workloads: placeholders are filled, the command is run as a trial, and its steps are observed.

**Placeholders.** `{batch_size}`, `{precision}`, `{accumulation_steps}` and `{num_workers}` are the values that are
tried; `{trial_dir}` and `{port}` differ from trial to trial; `{seed}` is that of `--seed`, the same in all.
`'{precision:bf16=--bf16|fp32=}'` (quoted for the shell) inserts no argument or several: the choice without arguments is
today's; otherwise name today's, as in `'{precision=fp32:bf16=--dtype bf16|fp32=--dtype fp32}'`. `--value` gives the
command's name for a precision. `--file` names a settings file with placeholders; each trial gets a filled copy, and a
file that another one names is given after it. A value that a file holds in several places has choices in each, with
words of its own, also inside the braces of JSON: `"bf16": {"enabled": {precision=bf16:bf16=true|fp32=false}}`. Doubled
braces, as in `{{epoch}}`, reach the training run as single ones; `${NAME}`, JSON, `{}` and formats such as `{date:%Y}`
are left alone. In Python: `recommend_config(CommandTemplate.of("python train.py --bs {batch_size=32}"))`.

**Your own arguments.** A placeholder with any other name lists the values to try of an argument of the command, today's
first: `--attn {attn=sdpa:eager|flash_attention_2}`, `--optim '{optim=adamw_torch:adamw_torch_fused}'`, or with
arguments `'{ckpt:on=--gradient_checkpointing|off=}'` (today: the choice without arguments, or `{ckpt=on:...}`). They
may stand in the command and in its `--file`. Each value is tried on the fastest setting so far and kept if it is 3 %
faster, or if it frees the memory that a larger batch needs. A value that the command refuses costs only its own row.
Its gradients are compared with those of fp32 and today's arguments; write `{!ckpt:...}` if it cannot affect them. A
value that changes the batches or the first weights stays *unchecked*; samples of another length are compared by their
tokens. If the first losses are equal bit for bit, and speed and memory within 3 %, the row says that the value may not
reach the training. `--try none` keeps today's values. A name like one of the placeholders above is an error that
suggests that one, and so is a name in braces without values. Before its trials the search prints what it tries, what
needs a placeholder, and how often it starts the command.

**Trials.** Each trial runs the command itself with a few hooks in it (`autotune_amp/command/agent`), until its steps
are measured; then the command and every process that it started are killed. Its output is shown if it fails. The first
run is the command as it is today; the next runs use another precision and, where other batch sizes may be tried,
another batch size. Both count as trials. With `--device cuda:1` the command sees that GPU alone, as `cuda`. A
placeholder that does not reach the training code is an error that names the requested and the observed value. A
precision in which the command fails, or is far too slow, is left out with a warning.

Where starts are long, most of the time goes by before the first training step. So several runs, as many as cores and
memory allow, are started together and wait there; then each trains alone, as it would by itself. One that fails while
others wait runs once more alone; if it then succeeds, as with a fixed port, no runs load together from then on.

**Fidelity.** The fidelity of a precision, and of your own arguments, is judged in runs of the command, by the gradients
of the same batches at the same first weights. What acts after the gradients, such as an optimizer, is not judged. A
model that is loaded in bf16 is compared with its weights converted to fp32; its rows called fp32 compute with the bf16
weights. Quantized weights (bitsandbytes) stay as they are in both runs, and are computed with in fp32 in one.

**Tokens and MFU.** If batches hold token ids in a tensor called `input_ids`, the tokens that the `attention_mask` marks
are counted (of packed sequences all of them), and the answer has tokens per second; `--objective tokens` compares
settings by these. Integers without that name are not counted. The operations of the first run's second step, which is
not timed, are counted, and related to this machine's own rate of matrix products. Those of compiled code and custom
kernels are not known; activations computed again by checkpointing count again.

**Effective batch size.** Without `{accumulation_steps}` a smaller batch size would change what the model learns, so
none is tried unless `--effective-batch-size free` is given. A script that itself accumulates to a total keeps its
effective batch size: if it accumulates today, it is run at another batch size to see whether its optimizer steps take
as many samples, and if so, all batch sizes that divide the total are tried. If a script changes its accumulation, in a
warm-up for instance, only the size of its batches is judged.

**Without placeholders.** The agent then sets batch size and precision: in the framework's arguments, else in the
script's own autocast regions, else around the model's forward. fp16 needs a GradScaler in the script. A value that
cannot be set is reported and not recommended. `run` starts the real training run in the same way: it prints one line on
the values that it set and where, replaces a GradScaler by a PrecisionController, and then is the command itself,
including its signals and exit code; a command without the recommended arguments of your own is an error. `apply` prints
a diff of the observed calls, runs an edited copy for a few steps and reports whether it ran with the recommended
values; places that it cannot edit are named by their lines.

**Diagnostics.** `check`, `memory`, `profile` and `fidelity` take a command after `--` too, with placeholders as in a
search. Each starts the command, lets it warm up and examines one of its own training steps in its own process, of
several ranks that of rank 0; then the command is ended. This needs `autotune_amp` in the Python that the command uses.
`check` records the step after the first one, in fp32, as if autocast were on: in the script's own autocast regions,
enabled or not, else from the first forward pass to the backward pass. It reads the files of the program and of the
modules that it has imported. `memory` and `profile` examine each precision at today's batch size, or at `--batch-size`
if that can be set; each measurement is a start of the command. On a CPU the peak is that of the whole process. Fewer
processes are timed if starts are long. `fidelity` makes the comparison described above. Later steps, evaluations and
checkpoints are not examined, `--snapshot` and `--pin` need a Workload.

**Supported training code**, and the values that are observed and set in it:

* A plain loop, also compiled, with several optimizers or LBFGS: steps, samples, accumulation and the skips of a
  GradScaler are seen; the batch size of the DataLoader is set, and the precision in its autocast regions, else around
  the forward.
* Without a DataLoader: the batch size is the leading dimension of the model's inputs, or the second one if that equals
  `{batch_size}`; the number of backward passes in a step gives the number of accumulated batches; the precision is set.
* Transformers' Trainer, as a loop, without evaluations: precision, batch size and accumulation are set in the
  `TrainingArguments` that it receives, and already where HfArgumentParser reads them from the command line, as in
  `trl sft`. Suggested are arguments of that parser with other values to try.
* Lightning, also its LightningCLI, as a loop: `Trainer(precision=, accumulate_grad_batches=)` and the DataLoader are
  set.
* Accelerate, also by `accelerate launch`, as a loop: `Accelerator(mixed_precision=, gradient_accumulation_steps=)` and
  the DataLoader are set. A command's own `--gradient_accumulation_steps`, which its script reads too, needs the
  placeholder.
* DeepSpeed, by its own launcher, torchrun or Accelerate: `train_micro_batch_size_per_gpu`,
  `gradient_accumulation_steps` and the precision are set in its config. Its loss scaler stays its own. A step of its
  engine is one, however often it calls its optimizer; steps that it skips because gradients are not finite, in bf16 in
  silence, are counted and reported, in `run` too. A precision is judged at weights rounded to it in both runs.
* torchrun with DDP or FSDP2, and `mp.spawn`: all ranks together are one trial, and the slowest rank sets the rate;
  values are set as in a loop, on every rank.
* Not supported, and reported as an error: weights updated without `torch.optim`, FSDP2's `CPUOffloadPolicy`,
  `nn.DataParallel` of Transformers' Trainer (start it with torchrun), `python -E`, `env -i`, containers, a shell script
  that sets PYTHONPATH without its former value.

**Cache.** The result of a finished search is reused for the same command while these files are unchanged: those that
the command names, those that its Python files import and its shell scripts name, and the code and settings (.py, .sh,
.yaml, .json, .toml, .cfg, .ini) that its trials read. Changes of other files do not matter.

**Your files.** No trial changes them: a trial that is about to overwrite, append to or delete an existing file is
stopped, and the error names the file and the line (send the output to `{trial_dir}`). This covers writes by Python
itself, torch, safetensors and SQLite. It does not cover `rm` or `>` in a shell script, programs that the script starts,
HDF5 and Arrow. A file opened for update (`r+`) may be read. A script started in `{trial_dir}` by `cd {trial_dir} &&
...` looks for its data there too: give absolute paths. Two searches of commands at the same time need folders of their
own, unless they write to `{trial_dir}` alone. Experiment trackers are off. Files that a trial creates outside of its
own folders, if written in one of these ways, are moved to the study's `trial_leftovers` when the trial ends, so that
neither the next trial nor the real training run resumes from its checkpoint. Caches, downloads and files that a torch
`Dataset` writes stay for the next trial, if they were complete when training began.

**Limits.** The report lists what the first steps of a command do not show: time and memory of later steps, evaluations
and checkpoints that the first steps do not reach, gradients beyond the first weights, and power draw
(`--objective energy`).
"""
