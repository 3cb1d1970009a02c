"""The exporting process: its clock, warnings, garbage, stack and interrupts, and what is patched in it.

Nothing is known here of models and of graphs.
"""
