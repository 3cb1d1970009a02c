"""The exporting process: its clock, warnings, garbage, stack, interrupts and patches. It knows nothing of models."""
