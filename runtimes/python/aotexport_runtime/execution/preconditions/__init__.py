"""What operators need beyond torch's own checks: rows of the table that `table.guarded` looks into."""
