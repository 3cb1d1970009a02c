"""Run the model's own code for real: its results and its changes.

Every run puts the model back as it was. This package knows nothing of graphs.
"""
