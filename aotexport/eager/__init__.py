"""Run the model's own code for real, and put the model back as it was. This package knows nothing of graphs."""
