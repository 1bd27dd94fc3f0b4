"""Where jobs run: processes of their own, forked or kept.

On a CPU, where the workload starts neither an accelerator nor threads, each job is forked from a process that has
loaded it. Everywhere else jobs run one after the other in one process, until one fails in it. Where there are four
cores and memory for it, a second process loads meanwhile and stands by (`standby`): it takes over, and is the fresh
process of the confirmation. A job has its deadline from the moment that its process is ready; loading has one of its
own.

Each of these processes, and each training command, is started by a small one (`keeper`), which ends all that came of it
and removes its temporary files (TMPDIR is a folder of its own): when it is told to, when the program ends, and when
the search is gone, killed too. What torch compiled stays where it was for the next process.

With several devices (`--devices`, `--slots`, `--ranks`):

* Trials and checks run on all of them at the same time, one on a card; each sees no other card. What runs is taken
  to end as the model of the throughput expects, so that the next trial is worth most beside it. Four slots reach a
  choice as good as one's in 31 to 42 % of the seconds (`studies/scale`, scripted).
* **The promise** is for a run alone. On cards the baseline is confirmed alone first, then whole rounds at once, one
  on each card. Where these were slower beyond chance (cards that share a CPU, PCIe or power), they do not count and
  rounds are run alone; the answer says by how much. On a CPU all rounds run alone, with all of it.
* Cards of another model than the first, and with `all` those that others use, are left out, and it is said. Results
  of unlike cards are never compared.
* **Ranks**: with `--ranks N` the exchange of gradients is in the step (gloo on shares of a CPU, NCCL on cards, which
  was not tried). Speeds and the effective batch size are those of all together, batch sizes those of each (left out,
  each has today's: it is said), memory that of the rank that takes the most. The answer says what they reach of N
  times one alone, and how to start such a training. A rank that fails is the trial's failure, by its number.
  Parameters without a gradient are noticed. Loops of your own, FSDP and several hosts: search the command.
"""
