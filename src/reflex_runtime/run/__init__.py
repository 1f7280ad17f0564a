"""What runs batches: drivers that wait, as thin loops around the pure scheduler, and processors that compute."""
