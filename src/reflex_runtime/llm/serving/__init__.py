"""The OpenAI API: the server of a language model."""
