"""Answer of a search, made from its records: the choice, its evidence, and the sentences that explain it."""
