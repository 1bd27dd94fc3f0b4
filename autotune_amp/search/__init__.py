"""Parent side of a search: it decides which setting to try next, and which one to recommend.

The next setting follows from a model of how throughput depends on precision and batch size: it is the setting with the
most expected gain per second, possibly one that ran already, if the spread of its processes leaves the choice open. A
Dataset or a function has no batch size of its own: the one named with `--baseline` or `--effective-batch-size` is kept,
and without them the search may change it. With the remaining time it measures larger effective batch sizes: an outlook,
never the recommendation.

The device is the NVIDIA GPU if there is one; if it cannot be used an error says why, and `--device cpu` does without
it. With `--device cuda:1`, `"cuda"` and `.cuda()` in your code mean that GPU.

`model` may be a module or a function that makes one; `data` a Dataset, a DataLoader, or a function of the batch size
that returns one batch or a loader; `optimizer` a class, a function of the parameters, or an instance. Live objects are
copied into the trials and never changed. No `if __name__ == "__main__"` guard is needed, and it works from a REPL. The
next call answers from the cache, about 40 ms beyond importing torch (`studies/overheads`), unless the hardware, a
version, an option, any object that the workload reaches, or its source files have changed, be it by a comment; then it
says which. Variables in `config.environment` can no longer be set in the script that asks: the throughput without them
is `evidence.plain_environment`, and the controller warns if they are missing.

A finished search is ranked again for another objective from its records; nothing is run, and the report says which
settings were not confirmed for that objective. `--objective energy` takes the least energy per sample, of the whole
device: NVIDIA's counter, or RAPL on a CPU, which usually only root can read and which virtual machines lack. Steps that
the loss scaler skips are not made up for.
"""
