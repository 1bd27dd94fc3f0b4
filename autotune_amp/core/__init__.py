"""Plain data and pure text, which everything else reads."""
