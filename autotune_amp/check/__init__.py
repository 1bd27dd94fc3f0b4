"""What breaks or hurts under autocast, found without the device: one recorded fp32 step, and the source.

One fp32 step on the CPU, and a look at your own files, name what will break or hurt under that autocast: the rule,
the module, file and line, why, and the line that mends it. No such device is needed: each call of the step is
repeated on tensors without data under the device's own autocast, as the torch that you have installed has it.

What will break: `binary_cross_entropy` on probabilities (CUDA raises); constants past 65504, as in
`masked_fill(-1e9)`; `autograd.Function` without `custom_fwd`; operands of two precisions; what has no kernels in half
precision, as decompositions, solvers, quantiles and Fourier transforms; fp16 weights. What the CPU's own kernels take
of two precisions, and in half precision, is asked of them, so that it holds for the torch that you have installed.

What will hurt: epsilons that fp16 rounds to zero; casts to a fixed format, an `autocast` inside the model; clipping
before `unscale_`, a `GradScaler` under bf16; `torch.cuda.amp`, sizes that are no multiple of 8 (16 for fp8); a loss
in half precision, bf16 or float64 weights.

The exit code is 4 where something will break, and 0 otherwise, so that it can stand in a CI job; `--json` prints one
document. In Python: `check_workload(workload, device="cuda")`. It does not see branches that the step does not take,
nor numbers that only training brings about: those are the fidelity check's. On the 29 healthy workloads of
`studies/fidelity`, and its held-out ones, it finds nothing.
"""
