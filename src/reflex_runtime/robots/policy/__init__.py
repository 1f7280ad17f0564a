"""Policies: an export becomes a processor that answers observations with chunks of actions."""
