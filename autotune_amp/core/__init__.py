"""Plain data types and pure text functions that every other package builds on."""
