"""Lets tests of one part use the helpers of another: `from policies.tiny import write_export`.

No test sends telemetry.
"""

from reflex_runtime.processors.quiet import telemetry_off

telemetry_off()
