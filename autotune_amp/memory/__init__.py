"""What fills the memory of a training, and which batch fits: jobs on the same backend as a search's."""
