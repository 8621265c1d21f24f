"""Triton kernels. Imported only where there is a CUDA device and Triton; each has a plain torch reference in tests."""
