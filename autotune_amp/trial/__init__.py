"""One isolated run of one candidate: the process boundary."""
