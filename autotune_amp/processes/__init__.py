"""Processes in which jobs run, forked or kept.

On a CPU, if the workload starts neither an accelerator nor threads, each job is forked from a process that has loaded
it. Otherwise all jobs run one after the other in one process, until a job fails in it. With four cores and enough
memory a standby process loads the workload meanwhile (`standby`): it replaces a process that failed, and is the fresh
process of the confirmation. A job's deadline starts when its process is ready; loading has a deadline of its own.

Each of these processes, and each training command, is started by a small process, the `keeper`. It kills all
descendants and removes their temporary files: when the search asks for it, when the program ends, and when the search
itself has ended or was killed. Each program has a folder for them below your TMPDIR; if its path has more than 40 bytes
and /tmp is writable, below /tmp, since names of sockets are short. Only the cache of torch.compile is kept for the next
process.

With several devices (`--devices`, `--ray`, `--ranks`):

* Trials and checks run on all GPUs at the same time, one on each, which sees no other GPU. The next trial is chosen as
  if running ones had the results that the throughput model predicts. Four devices reach the confirmation in 41 to 50 %
  of the seconds of one, with an equally good choice (`studies/scale`, simulated).
* GPUs of one host share its CPU, PCIe and power. The confirmation therefore runs one job at a time on one device, while
  the others are idle.
* GPUs of another model than the first, and with `all` those in use by other processes, are left out, with a note.
  Results of different models are never compared.
* **Ranks**: with `--ranks N` the step includes the exchange of gradients (gloo on shares of a CPU, NCCL on GPUs, which
  is untested). Speeds and the effective batch size are the total over the ranks, batch sizes those of each (if left
  out, each rank has the user's own, with a note), memory that of the rank that takes the most. The report compares N
  ranks with N times a single rank, and shows how to start such a training run. If a rank fails, so does the trial, with
  the rank's number. Parameters without a gradient are detected. For loops of your own, FSDP and several hosts, search
  the command.
"""
