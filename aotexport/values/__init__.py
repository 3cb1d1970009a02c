"""Sizes and tensor subclasses of torch as records of the schema. Nothing is known here of graphs."""
