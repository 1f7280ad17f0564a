"""The real scheduler on a jumping clock: tests, tuning, capacity planning and replay."""
