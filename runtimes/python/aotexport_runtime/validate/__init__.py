"""Consistency of decoded records: rules that the types of the schema cannot express. No torch.

No record is used before it has passed here. A `check_*` raises the first fault, or notes all if `Place` collects them.
"""
