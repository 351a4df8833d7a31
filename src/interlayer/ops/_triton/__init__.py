"""Fused kernels, one file per operation. They run on a GPU, or on any device under TRITON_INTERPRET=1."""
