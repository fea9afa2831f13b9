"""Kernels for CPUs in C++, compiled for the machine at hand when they are first needed.

Every kernel stands beside a torch reference, which runs where there is no compiler.
"""

from specdec.kernels.cpu.library import native_library, native_library_fault
from specdec.kernels.cpu.matrix import MatrixFormat, MatrixStruct, PackedMatrix
from specdec.kernels.cpu.shared_memory import SharedMemory

__all__ = [
    "MatrixFormat",
    "MatrixStruct",
    "PackedMatrix",
    "SharedMemory",
    "native_library",
    "native_library_fault",
]
