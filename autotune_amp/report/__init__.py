"""Output: progress and results on the terminal, HTML reports, error messages."""
