"""The exporting process: its clock, warnings, garbage, stack, interrupts and patches.

This package knows nothing of models and graphs.
"""
