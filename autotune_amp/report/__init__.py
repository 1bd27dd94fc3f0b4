"""What people see: progress, results, errors."""
