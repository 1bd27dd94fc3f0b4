"""Profile of a training step in a child process, and the parts that its time is divided into."""
