"""Simulated robots in closed loop on a real policy behind a real server: `python examples/demo`, or `make demo`.

`tasks` needs nothing beyond the plain install. `world` and `camera`, loaded by the robots' processes only, need the
extra `demo`.
"""
