"""Outputs: results that leave for a receiver that may be slow or away, each on a thread of its own.

An output never delays a frame. Its queue is bounded, and the newest results win: where there is no room, the oldest one
is dropped and counted.
"""
