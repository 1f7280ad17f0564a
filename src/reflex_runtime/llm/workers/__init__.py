"""A language model in runtime processes."""
