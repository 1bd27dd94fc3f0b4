"""A recommendation written into a training script: what is edited where, and the copy that proves it."""
