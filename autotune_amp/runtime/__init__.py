"""The part that lives in the training loop: the controller, its policy and its diagnosis."""
