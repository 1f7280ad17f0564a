"""The directory a policy is read from."""
