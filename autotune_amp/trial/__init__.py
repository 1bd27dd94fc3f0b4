"""Code that runs in a trial's process, and the jobs it is given: trials, checks, a description of the workload."""
