"""Consistency of decoded records: rules that the types of the schema cannot express. No torch.

No record of a bundle is used before it has passed here, and nothing here runs code of the bundle. Each `check_*`
refuses a fault by `BundleInvalid`: it raises the first, or notes all where its `Place` collects them.
"""

from aotexport_runtime.validate.arguments import descendants, references

__all__ = ["descendants", "references"]
