"""The chain of a call, which `plan.py` composes: guards, flattening, an engine with its epilogues, the results."""
