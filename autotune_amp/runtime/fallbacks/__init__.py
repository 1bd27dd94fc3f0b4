"""Fallbacks of the precision: which this device can take, and what people are told of them."""
