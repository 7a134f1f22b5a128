"""The fused operators as Triton kernels; each file imports Triton and is imported when its operator runs on CUDA."""
