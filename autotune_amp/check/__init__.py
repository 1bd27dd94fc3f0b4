"""What breaks or hurts under autocast, found without the device: one recorded fp32 step, and the source."""
