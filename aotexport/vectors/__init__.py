"""Recorded calls of eager execution: the example, fresh random values, and other sizes of dynamic dimensions.

They decide whether an export is right, and ship as the bundle's self-test.
"""
