"""Service for a team."""
