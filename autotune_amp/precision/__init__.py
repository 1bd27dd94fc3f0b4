"""Precisions: autocast, flags and loss scaler of each, and casts around single modules."""
