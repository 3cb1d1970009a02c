"""Verify ONNX models: compare ONNX Runtime with recorded calls and with the forward graph."""
