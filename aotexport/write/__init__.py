"""Write records to a directory."""
