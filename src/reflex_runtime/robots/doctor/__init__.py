"""What is wrong with an export, and what to do about it."""
