"""Check of a workload or a training command for code that breaks or hurts under autocast, without the device.

One fp32 step is recorded on the CPU (of a command where it trains), and your own files are read. Each finding names the
rule, the module, file and line, the reason, and the line that fixes it. No GPU is needed: each call of the step is
repeated on tensors without data under the device's own autocast, as the installed torch implements it.

Code that will break: `binary_cross_entropy` on probabilities (CUDA raises); constants past 65504, as in
`masked_fill(-1e9)`; `autograd.Function` without `custom_fwd`; operands of two precisions; operations without kernels
in half precision, such as decompositions, solvers, quantiles and Fourier transforms; fp16 weights. The CPU's own
kernels are run to see which mixed and half-precision operands they accept, so the answer holds for the installed torch.

Code that will hurt: epsilons that fp16 rounds to zero; casts to a fixed format, an `autocast` inside the model;
clipping before `unscale_`, a `GradScaler` under bf16; `torch.cuda.amp`, sizes that are no multiple of 8 (16 for fp8);
a loss in half precision, bf16 or float64 weights.

The exit code is 4 if something will break, else 0, so the check can run in a CI job; `--json` prints one document. In
Python: `check_workload(workload, device="cuda")`, where `workload` may be a `CommandTemplate`. The check does not see
branches that the step does not take, nor values that only arise in training; the fidelity check covers those. It finds
nothing on the 29 healthy workloads of `studies/fidelity` and on its held-out ones.
"""
