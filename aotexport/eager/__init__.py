"""Run the model's own code for real: its results, its changes, and the effects of its first call alone.

Every run puts the model back as it was. This package knows nothing of graphs.
"""
