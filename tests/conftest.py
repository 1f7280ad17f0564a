"""Lets tests of one part use the helpers of another: `from policies.tiny import write_export`."""
