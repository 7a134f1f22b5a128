"""What torch traces: models and heads as modules whose attention and cache writes are ONNX nodes."""
