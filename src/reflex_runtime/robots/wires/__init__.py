"""Protocols that robots and simulators speak: pure codecs, and sessions without I/O. See docs/wires.md."""
