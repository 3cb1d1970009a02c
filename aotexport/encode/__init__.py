"""torch objects to records of the format: one noun per file."""
