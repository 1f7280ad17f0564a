"""Benchmarks: ratios measured in one run, in interleaved rounds, with their spread. Run `python -m bench`."""
