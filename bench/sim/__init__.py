"""Research in virtual time: rules of other systems, bounds, fleets. `python -m bench.sim --help`."""
