"""Verification of ONNX models: ONNX Runtime beside recorded calls and beside the forward graph."""
