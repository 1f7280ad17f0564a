"""Continuous batching of tokens: prompts and outputs of many requests in steps over one paged cache."""
