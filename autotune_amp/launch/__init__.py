"""A training command as a workload: what fills it, runs it, and hears of its steps.

`{batch_size}`, `{precision}`, `{accumulation_steps}` and `{num_workers}` are what is tried; `{seed}`, `{trial_dir}`
and `{port}` are each trial's own. `'{precision:bf16=--bf16|fp32=}'` (quoted, for the shell's sake) puts none or
several arguments there: the choice without any is today's, else `'{precision=fp32:bf16=--dtype bf16|fp32=--dtype
fp32}'` says which. `--value` says what the command calls a precision; `--file` names a settings file with
placeholders, of which each trial gets a filled copy. Braces with any other name are an error that says the nearest;
doubled ones, as in `{{epoch}}`, reach the training as single ones; `${NAME}`, JSON, `{}` and formats such as
`{date:%Y}` stay as they are. In Python:
`recommend_config(LaunchLine.of("python train.py --bs {batch_size=32}"))`.

Each trial is the command itself, started with a few hooks in it (`autotune_amp/launch/agent`), watched until its
steps are measured, and killed with all that it started; what it prints is shown where it fails. First it is run as
it is today, then in another precision, and with another batch size where others may be tried; both count as trials. A
placeholder that does not reach the training is an error that names both values that were seen. A precision that the
command refuses, or in which it is hopelessly slow, is left out with a warning. Whether a precision is faithful is
judged inside the command, by the gradients of the same batches on the same first weights; a model that is loaded in
bf16 is held against its weights raised to fp32, and its rows called fp32 compute with them as they are. Without
`{accumulation_steps}` a smaller batch would change what the training learns, so none is tried unless
`--effective-batch-size free`. A script that itself accumulates to a total keeps its effective batch size: one that
accumulates today is run at another batch size to see whether its optimizer steps take as many samples, and if so all
batch sizes that make up the total are tried. Of one that changes its accumulation, in a warm-up for instance, only the
size of its batches is judged.

Without placeholders, batch size and precision are set from outside: in the framework's own arguments, else in the
script's own autocast regions, else around the model's forward. fp16 needs a GradScaler of the script's own. What
cannot be set is said, and not recommended. `run` then starts the real training so: it says in one line what it set
and where, puts a PrecisionController in the place of a GradScaler, and is the command itself from there on, its
signals and exit code too. `apply` prints a diff of the calls that were seen, runs an edited copy for a few steps and
says whether it does what the diff says; what it cannot edit it names with its line.

What is understood of a training, seen and set from outside:

* a plain loop, compiled too, several optimizers, LBFGS: steps, samples, accumulation and the skips of a GradScaler
  are seen; the batch size of the DataLoader is set, and the precision in its autocast regions, else around the
  forward.
* without a DataLoader: the batch size is the leading dimension of what enters the model, or the second where that is
  `{batch_size}`, and the backward passes of a step say how many batches it accumulates; the precision is set.
* Transformers' Trainer, as a loop, evaluations left out: the `TrainingArguments` that it receives are set (precision,
  batch size, accumulation); of HfArgumentParser's arguments `--per_device_train_batch_size`,
  `--gradient_accumulation_steps`, `--bf16` and `--fp16` are known.
* Lightning, as a loop: `Trainer(precision=, accumulate_grad_batches=)` and the DataLoader are set; LightningCLI's
  `--trainer.precision` and `--trainer.accumulate_grad_batches` are known.
* Accelerate, as a loop: `Accelerator(mixed_precision=, gradient_accumulation_steps=)` and the DataLoader are set;
  `accelerate launch --mixed_precision` is known.
* torchrun with DDP or FSDP2, `mp.spawn`: the ranks are one trial, and the slowest sets the rate; set as in a loop,
  on every rank.
* weights updated without `torch.optim`, `python -E`, `env -i` and containers are not understood: an error says so.

A finished search is answered from the cache for the same command as long as the files that it names, those that its
Python files import and its shell scripts name, and the code and settings (.py, .sh, .yaml, .json, .toml, .cfg, .ini)
that its trials read stay as they are; what else lies beside the script does not count.

Nothing of yours is touched: a trial that is about to overwrite, append to or delete a file that was there before is
stopped, and says which and where (send its output to `{trial_dir}`). That is known of Python's own writing, torch's,
safetensors' and SQLite's; not of `rm` or `>` in a shell script, of programs that the script starts, of HDF5 and
Arrow. A file opened to be updated (`r+`) may be read. Started in `{trial_dir}` by `cd {trial_dir} && ...`, a script
looks for its data there too: name them by absolute paths. Experiment trackers are off. What is so known to be made by a
trial outside of its own folders is moved to the study's `trial_leftovers` when the trial ends, so that neither the next
trial nor the real training resumes from its checkpoint. Caches, downloads and what a torch `Dataset` writes stay for
the next trial, if they were complete when training began. What a command cannot tell, it says: what later steps take in
time and memory, evaluations and checkpoints that the first steps do not reach, gradients beyond the first weights, what
it draws (`--objective energy`).
"""
