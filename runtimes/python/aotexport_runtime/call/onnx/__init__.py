"""Calls of ONNX models: the call chain of a program whose graph ONNX Runtime runs."""
