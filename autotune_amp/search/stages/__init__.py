"""Stages of a search, each of which returns the next job to run."""
