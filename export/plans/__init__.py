"""From a bundle's graphs to TensorRT plans: choose the roles, rewrite, audit and compile each, write it whole."""
