"""Records to a directory."""
