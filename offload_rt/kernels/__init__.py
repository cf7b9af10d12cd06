"""Kernels for CPUs and GPUs, and the plain form that each is compared with."""
