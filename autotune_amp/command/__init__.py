"""Training commands as workloads: placeholders are filled, the command is run as a trial, and its steps are observed.

**Placeholders.** `{batch_size}`, `{precision}`, `{accumulation_steps}` and `{num_workers}` are the values that are
tried; `{seed}`, `{trial_dir}` and `{port}` differ from trial to trial. `'{precision:bf16=--bf16|fp32=}'` (quoted for
the shell) inserts no argument or several: the choice without arguments is today's; otherwise name today's, as in
`'{precision=fp32:bf16=--dtype bf16|fp32=--dtype fp32}'`. `--value` gives the command's name for a precision. `--file`
names a settings file with placeholders; each trial gets a filled copy. Any other name in braces is an error that
suggests the nearest name. Doubled braces, as in `{{epoch}}`, reach the training run as single ones; `${NAME}`, JSON,
`{}` and formats such as `{date:%Y}` are left alone. In Python:
`recommend_config(CommandTemplate.of("python train.py --bs {batch_size=32}"))`.

**Trials.** Each trial runs the command itself with a few hooks in it (`autotune_amp/command/agent`), until its steps
are measured; then the command and every process that it started are killed. Its output is shown if it fails. The first
run is the command as it is today; the next runs use another precision and, where other batch sizes may be tried,
another batch size. Both count as trials. A placeholder that does not reach the training code is an error that names the
requested and the observed value. A precision in which the command fails, or is far too slow, is left out with a
warning.

**One start for several settings.** On Linux, a run of one process without compiled code is paused once it is measured.
The next trial that differs only in a precision or batch size set without a placeholder continues it with these values:
trained weights, optimizer state and random numbers are put back, a GradScaler starts anew, the warm-up begins again.
What cannot be changed there (a framework's precision, a batch sampler of the script's own) is started, and so is a
setting that fails after such a change, except for lack of time, or of memory at a batch size larger than before.
Schedulers and the script's own counters are not put back. Fidelity checks and confirmations are always runs of their
own.

**Fidelity.** The fidelity of a precision is judged in runs of the command, by the gradients of the same batches at the
same first weights. A model that is loaded in bf16 is compared with its weights converted to fp32; its rows called fp32
compute with the bf16 weights.

**Effective batch size.** Without `{accumulation_steps}` a smaller batch size would change what the model learns, so
none is tried unless `--effective-batch-size free` is given. A script that itself accumulates to a total keeps its
effective batch size: if it accumulates today, it is run at another batch size to see whether its optimizer steps take
as many samples, and if so, all batch sizes that divide the total are tried. If a script changes its accumulation, in a
warm-up for instance, only the size of its batches is judged.

**Without placeholders.** The agent then sets batch size and precision: in the framework's arguments, else in the
script's own autocast regions, else around the model's forward. fp16 needs a GradScaler in the script. A value that
cannot be set is reported and not recommended. `run` starts the real training run in the same way: it prints one line
on the values that it set and where, replaces a GradScaler by a PrecisionController, and then is the command itself,
including its signals and exit code. `apply` prints a diff of the observed calls, runs an edited copy for a
few steps and reports whether it ran with the recommended values; places that it cannot edit are named by their lines.

**Supported training code**, and the values that are observed and set in it:

* A plain loop, also compiled, with several optimizers or LBFGS: steps, samples, accumulation and the skips of a
  GradScaler are seen; the batch size of the DataLoader is set, and the precision in its autocast regions, else around
  the forward.
* Without a DataLoader: the batch size is the leading dimension of the model's inputs, or the second one if that equals
  `{batch_size}`; the number of backward passes in a step gives the number of accumulated batches; the precision is set.
* Transformers' Trainer, as a loop, without evaluations: precision, batch size and accumulation are set in the
  `TrainingArguments` that it receives. Of HfArgumentParser's arguments, `--per_device_train_batch_size`,
  `--gradient_accumulation_steps`, `--bf16` and `--fp16` are known.
* Lightning, as a loop: `Trainer(precision=, accumulate_grad_batches=)` and the DataLoader are set. LightningCLI's
  `--trainer.precision` and `--trainer.accumulate_grad_batches` are known.
* Accelerate, as a loop: `Accelerator(mixed_precision=, gradient_accumulation_steps=)` and the DataLoader are set.
  `accelerate launch --mixed_precision` is known.
* torchrun with DDP or FSDP2, and `mp.spawn`: all ranks together are one trial, and the slowest rank sets the rate;
  values are set as in a loop, on every rank.
* Not supported, and reported as an error: weights updated without `torch.optim`, `python -E`, `env -i`, containers.

**Cache.** The result of a finished search is reused for the same command while these files are unchanged: those that
the command names, those that its Python files import and its shell scripts name, and the code and settings (.py, .sh,
.yaml, .json, .toml, .cfg, .ini) that its trials read. Changes of other files do not matter.

**Your files.** No trial changes them: a trial that is about to overwrite, append to or delete an existing file is
stopped, and the error names the file and the line (send the output to `{trial_dir}`). This covers writes by Python
itself, torch, safetensors and SQLite. It does not cover `rm` or `>` in a shell script, programs that the script starts,
HDF5 and Arrow. A file opened for update (`r+`) may be read. A script started in `{trial_dir}` by `cd {trial_dir} &&
...` looks for its data there too: give absolute paths. Experiment trackers are off. Files that a trial creates outside
of its own folders, if written in one of these ways, are moved to the study's `trial_leftovers` when the trial ends, so
that neither the next trial nor the real training run resumes from its checkpoint. Caches, downloads and files that a
torch `Dataset` writes stay for the next trial, if they were complete when training began.

**Limits.** The report lists what the first steps of a command do not show: time and memory of later steps, evaluations
and checkpoints that the first steps do not reach, gradients beyond the first weights, and power draw
(`--objective energy`).
"""
