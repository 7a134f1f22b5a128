"""The torch types of ONNX tensors, by their numbers in ONNX."""

import torch

DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
    17: torch.float8_e4m3fn,
}
INT4, FLOAT4 = 22, 23  # torch has no such types
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)  # what the sixteen numbers of FLOAT4 are


def dtype_of(number: int) -> torch.dtype:
    if number not in DTYPES:
        raise ValueError(f"torch has no type for the ONNX type {number}")
    return DTYPES[number]
