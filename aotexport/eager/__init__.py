"""The model's own code, run for real: what it gives, what it changes, and what its first call alone does.

Every run puts the model back as it was. Nothing is known here of graphs.
"""
