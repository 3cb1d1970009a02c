"""Verify ONNX models: compare ONNX Runtime with recorded calls."""
