"""The parent side of a search: which candidates, in which order, and the choice.

Which candidate is next follows from a model of how throughput depends on precision and batch size: the one that
promises most a second, which is one that ran already where processes differ so much that the choice hangs on it. A
Dataset or a function has no batch size of its own: what `--baseline` or `--effective-batch-size` names is kept, and
without them the search may change it. With time that is left it measures what larger effective batches would reach:
an outlook, never the recommendation.

The device is the NVIDIA card where there is one; where that cannot be used it is an error that says why, and
`--device cpu` does without it. With `--device cuda:1`, `"cuda"` and `.cuda()` in your code mean that card.

`model` may be a module or a function that makes one; `data` a Dataset, a DataLoader, or a function of the batch size
that returns one batch or a loader; `optimizer` a class, a function of the parameters, or an instance. Live objects
are copied into the trials and never changed. It needs no `if __name__ == "__main__"` guard, and works from a REPL.
The next call answers from the cache, about 40 ms beyond importing torch (`studies/overheads`), unless the hardware,
a version, an option, any object that the workload reaches, or its source files have changed, be it by a comment;
then it says what did. Variables in `config.environment` can no longer be set in the script that asks: what it
reaches without them is `evidence.plain_environment`, and the controller warns where they are missing.

A finished search is ranked again from what it measured; nothing is run, and what was not confirmed for that
objective says so. `--objective energy` takes the least energy per sample, of the whole device: NVIDIA's counter, or
RAPL on a CPU, which usually only root can read and which virtual machines lack. Steps that the loss scaler skips are
not made up for.
"""
