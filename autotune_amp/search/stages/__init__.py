"""The stages of a search: each says which job it wants run next."""
