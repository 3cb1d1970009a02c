"""Shared libraries for processors, by AOTInductor, without weights: partition, decompose, compile, record."""
