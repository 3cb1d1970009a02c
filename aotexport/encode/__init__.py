"""Captured graphs to records of the format, one noun per file.

FX graphs and AOTAutograd's metadata come in, `EncodedProgram` goes out; a functional graph that the format cannot hold
is left out, with the reason. Nothing is written to disk here.
"""
