"""Thin adapters to training frameworks, which only translate hooks. Each is imported only by its users."""
