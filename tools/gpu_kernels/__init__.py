"""Compilation of the GPU kernels without a GPU, and a record of what each takes.

`python -m tools.gpu_kernels update` compiles every kernel for sm_80 and sm_90 and writes registers,
spills and shared memory to docs/benchmarks/gpu-kernels.json; `check` compiles them again and fails
where one spills more, or takes more than a limit. Needs Triton, whose wheel has ptxas.
"""
