"""Processes in which jobs run, forked or kept.

On a CPU, if the workload starts neither an accelerator nor threads, each job is forked from a process that has loaded
it. Everywhere else jobs run one after the other in one process, until a job fails in it. With four cores and enough
memory a second process loads meanwhile and stands by (`standby`): it takes over, and is the fresh process of the
confirmation. A job's deadline starts when its process is ready; loading has a deadline of its own.

Each of these processes, and each training command, is started by a small one (`keeper`), which ends all that came of it
and removes its temporary files (TMPDIR is a folder of its own): when it is told to, when the program ends, and when
the search is gone, killed too. What torch compiled stays where it was for the next process.

With several devices (`--devices`, `--ray`, `--ranks`):

* Trials and checks run on all of them at the same time, one on each GPU; each sees no other GPU. Running jobs are
  assumed to end as the throughput model predicts, so that the next trial is the most valuable one in addition. Four
  devices reach the confirmation in 41 to 50 % of the seconds of one, with a choice as good (`studies/scale`, scripted).
* **The promise** holds for a run alone: GPUs of one host share its CPU, PCIe and power. The confirmation runs one job
  at a time on one device, while the others are idle.
* GPUs of another model than the first, and with `all` those that others use, are left out, with a note. Results of
  different models are never compared.
* **Ranks**: with `--ranks N` the step includes the exchange of gradients (gloo on shares of a CPU, NCCL on GPUs, which
  was not tried). Speeds and the effective batch size are the total over the ranks, batch sizes those of each (if left
  out, each rank has the user's own, with a note), memory that of the rank that takes the most. The report compares N
  ranks with N times one alone, and shows how to start such a training run. A rank that fails is the trial's failure,
  with its number. Parameters without a gradient are noticed. For loops of your own, FSDP and several hosts, search the
  command.
"""
