"""Output for people: progress, results, errors."""
