"""Captured graphs to records of the format, one noun per file; nothing is written to disk here."""
