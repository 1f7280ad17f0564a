"""Whatever waits: thin loops around the pure scheduler."""
