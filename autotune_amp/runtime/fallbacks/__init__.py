"""Fallbacks of the precision: the check against this device, and messages to the user."""
