"""What was recorded, replayed and reported."""
