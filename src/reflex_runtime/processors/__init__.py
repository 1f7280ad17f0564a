"""Code that runs batches."""
