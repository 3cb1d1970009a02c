"""Recorded calls of eager execution: they decide whether an export is right, and ship as the self-test."""
