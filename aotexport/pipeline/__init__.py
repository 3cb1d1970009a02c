"""The ways from a model to a bundle, and from a bundle to its ONNX models: every stage in order, and nothing else."""
