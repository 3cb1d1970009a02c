"""Graphs to Python: records of graphs come in, functions of flat inputs and symbols go out."""
