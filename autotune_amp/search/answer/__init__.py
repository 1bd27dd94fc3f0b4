"""Recommendation of a search from its records: the chosen setting, its evidence, and the sentences that explain it."""
