"""What `reflex demo` runs: two bundled policies, simulated robots, and the code that starts the one against the other.

`exports` (the policies) and `tasks` need nothing beyond the plain install. `world` and `camera`, loaded by the robot
processes only, need the extra `demo`.
"""
