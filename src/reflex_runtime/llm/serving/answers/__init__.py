"""What clients get: the answers and errors of each API, whole or as events."""
