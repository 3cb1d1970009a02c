"""Submodules of a loaded bundle: they hold its state under the original names, and their tables report every change."""
