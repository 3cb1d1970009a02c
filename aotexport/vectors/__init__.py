"""Recorded calls of eager execution: the example, fresh random values, and other sizes of dynamic dimensions.

They decide whether an export is right, and ship as the bundle's self-test.

record.py     the calls of a program, recorded and written
arguments.py  which arguments they have
eager.py      the model's own code, run on them
"""
