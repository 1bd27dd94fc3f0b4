"""Numerical truth: a precision against fp32, and the loss scale from measured gradients."""
