"""The pure scheduler core: no clock, no thread, no loop, no I/O."""
