"""Parent process of a search: it decides which setting to try next, and which one to recommend.

A model predicts throughput from precision and batch size. The next setting is the one with the most expected gain per
second, possibly one that ran already, if its processes differ too much to decide. A Dataset or a function has no batch
size of its own: the one set with `--baseline` or `--effective-batch-size` is kept, and without them the search may
change it. In the remaining time it measures larger effective batch sizes, which are reported but never recommended.

The device is the NVIDIA GPU if there is one. If it cannot be used, an error says why; `--device cpu` avoids it. With
`--device cuda:1`, `"cuda"` and `.cuda()` in your code mean that GPU.

`model` may be a module or a function that returns one; `data` a Dataset, a DataLoader, or a function of the batch size
that returns one batch or a loader; `optimizer` a class, a function of the parameters, or an instance. Live objects are
copied into the trials and never changed. No `if __name__ == "__main__"` guard is needed, and it works from a REPL. The
next call returns the cached recommendation, about 40 ms after importing torch (`studies/overheads`), unless the
hardware, a version, an option, an object that the workload uses, or its source files have changed, even in a comment;
then the report names the change. Variables in `config.environment` must be set before the script starts: the throughput
without them is `evidence.plain_environment`, and the controller warns if they are missing.

A finished search is ranked again for another objective from its records; nothing is run, and the report says which
settings were not confirmed for that objective. `--objective tokens` compares real tokens per second in place of
samples, which differ if a setting changes what a sample holds (`command.agent.tokens` says what is counted).
`--objective energy` minimizes the energy per sample of the whole device, read from NVIDIA's counter or, on a CPU, from
RAPL, which usually only root can read and which virtual machines lack. Steps that the loss scaler skips are not
repeated.
"""
