"""Drivers: the code that waits, as thin loops around the pure scheduler."""
