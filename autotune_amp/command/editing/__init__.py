"""Write a recommendation into a training script: make the edits, and verify them by running an edited copy."""
