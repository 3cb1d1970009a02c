"""Guards: which calls does a program serve? Rows: a predicate, a message, the cost of the predicate.

Two functions are generated from the rows: `rule.py` makes one that explains, `call/plan.py` one that serves the usual
calls by quick forms. A program with a row that has no quick form has no fast path.
"""
