"""What a search keeps: its own folder, its study in an Optuna storage, and there its answer for others."""
