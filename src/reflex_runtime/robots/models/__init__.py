"""The models of each kind of source."""
