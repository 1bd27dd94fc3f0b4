"""Memory profile of a training step, and the largest batch that fits. Uses the same backends as a search.

`memory` (in Python `profile_memory()`) runs a few steps of each precision in separate processes, first for the peak,
then one step in which every tensor is inspected: parameters, gradients, optimizer state, the batch and the weights cast
by autocast, exactly, each storage once; activations by the module whose forward pass saved them; and the rest of the
peak (temporaries, workspaces, memory cached by the allocator). `--fit` measures three to six batch sizes that this
device holds, until one is near the limit, fits M(b) = max(m0, m1 + m2·b) to the ones around it and reports the largest
batch that fits, the error at the nearest size of the model fitted to the others, and the batch with that error allowed
for. Savings are ranked by their bytes: another precision as measured, checkpointed blocks, optimizer state, half the
batch. On CUDA `--snapshot FILE` writes PyTorch's own memory snapshot of the step. `--json` prints one document. On a
CPU "the rest" includes the code and heap that a first step loads; for a training command (`memory -- COMMAND`) the
peak is that of the whole process, which includes Python, libraries and data.
"""
