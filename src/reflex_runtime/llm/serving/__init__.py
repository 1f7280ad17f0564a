"""The server of a language model: its APIs, and the way from a request to the engine and back."""
