"""What runs in a trial's process, and the jobs that it is asked for: trials, checks, a description."""
