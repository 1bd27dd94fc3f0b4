"""From the records to the recommendation: what is chosen, its evidence, and the sentences that explain it."""
