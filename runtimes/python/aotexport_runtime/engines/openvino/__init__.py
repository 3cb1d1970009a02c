"""The engine `openvino`: ONNX models of programs through OpenVINO, where it computes them as eager does."""
