"""An optimizer before it steps: its gradients, and how it wants to be stepped."""
