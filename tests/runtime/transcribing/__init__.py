"""Writing down what is heard."""
