"""One file per client protocol."""
