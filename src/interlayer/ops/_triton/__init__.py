"""Fused kernels, one file an operation. They run on a GPU, or on any device under TRITON_INTERPRET=1."""
