"""Robots on every wire of a policy server, as their stock clients speak it, for the load generator."""
