"""Servers measured from outside, as their clients see them: `reflex probe` and `reflex bench`."""
