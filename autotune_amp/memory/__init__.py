"""What fills the memory of a training, and which batch fits: jobs on the same backend as a search's.

`memory` (in Python `profile_memory()`) runs a few steps of each precision in processes of their own, the peak first,
then one step with a look at every tensor: parameters, gradients, optimizer state, the batch and the weights that
autocast casts, exactly, each storage once; activations by the module whose forward pass saved them; and the rest of
the peak (temporaries, workspaces, what the allocator holds in between). `--fit` measures three to six batch sizes
that this device holds, until one is near the limit, puts M(b) = max(m0, m1 + m2·b) through those around it and says
the largest batch that fits, how far the model of the others was off at the nearest, and the batch with that error
allowed for. What would free most is ranked by its bytes: another precision as measured, checkpointed blocks,
optimizer state, half the batch. On CUDA `--snapshot FILE` writes PyTorch's own memory snapshot of the step. `--json`
prints one document. On a CPU "the rest" holds the code and heap that a first step brings in.
"""
