"""Handling of an optimizer before it steps: its gradients, and how it has to be stepped."""
