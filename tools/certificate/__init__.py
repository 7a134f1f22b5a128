"""The checks of `trt-spec verify`, one idea a file; each yields what it found, case by case."""
