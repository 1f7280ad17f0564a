"""Feeds as threads: a source is read, its frames pass stages and a shared batch point, results reach sinks."""
