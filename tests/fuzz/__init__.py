"""Fuzzing of what a bundle's author chooses: the arguments of operators."""
