"""The parent side of a search: which candidates, in which order, and the choice."""
