"""Thin adapters to training frameworks: hooks translated and nothing else. Each is imported by its user alone."""
