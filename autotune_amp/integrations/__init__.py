"""Adapters to training frameworks, exports to them, and metric sinks. Each module needs its own framework."""
