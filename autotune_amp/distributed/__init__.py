"""The ranks of the caller's own launcher."""
