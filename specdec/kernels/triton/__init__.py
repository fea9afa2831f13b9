"""Kernels in Triton for GPUs, each beside its torch reference.

`device` has the code that runs on the GPU; the modules here check tensors, plan and launch. Only
this folder imports Triton, and only where a model is loaded on it (`availability`). Kernels have
fixed shapes, and none waits for the device, so that a CUDA graph can hold them.
"""
