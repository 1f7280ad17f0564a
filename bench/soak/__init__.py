"""What stays true for ten minutes of faults, hostile inputs and mixed traffic: `python -m bench.soak`, `make soak`."""
