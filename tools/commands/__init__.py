"""The commands of `trt-spec`, one file each: `add_arguments(parser)` and `run(arguments)`."""
