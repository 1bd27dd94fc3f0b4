"""The further dimensions on live objects: what a model and an optimizer can have, and setting it up."""
