"""Values of a setting that the agent sets from outside, in the script's own code and in frameworks."""
