"""Recommendations written into a training script: the edits, and the run of an edited copy that verifies them."""
