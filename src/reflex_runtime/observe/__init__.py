"""Folds over the event stream: metrics, traces, health."""
