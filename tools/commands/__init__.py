"""The commands of `trt-spec`, each in a file with `add_arguments(parser)` and `run(arguments)`."""
