"""Recorded calls of eager execution: the example, fresh random values, and other sizes of dynamic dimensions.

They decide whether an export is right, and ship as the bundle's self-test.

record.py        the calls of a program, recorded and written
versions.py      rises of versions, and saved tensors that eager checks
paths.py         calls that take another path than their program's
small_sizes.py   programs that begin at sizes 0 and 1
eager_errors.py  eager's own errors in float32
"""
