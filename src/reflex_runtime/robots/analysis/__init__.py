"""What can be learned of a policy without serving it: doctor, replay, report."""
