"""Measures bundles against eager execution, in one run; see README.md beside this file."""
