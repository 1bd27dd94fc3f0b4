"""What a precision sets: autocast, flags, scaler, casts around modules."""
