"""What operators need beyond torch's own checks; the operators are in `table`."""
