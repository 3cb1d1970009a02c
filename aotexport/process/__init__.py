"""The exporting process: its clock, warnings, garbage, stack and interrupts. Nothing is known here of models."""
