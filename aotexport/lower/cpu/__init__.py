"""Shared libraries for processors, compiled by AOTInductor; they hold no weights.

functional graph -> partition -> subgraphs -> trace with the compiler's decompositions -> compile -> record
"""
