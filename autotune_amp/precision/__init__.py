"""Precisions: their autocast, torch flags and loss scaler, and the precision of single modules."""
