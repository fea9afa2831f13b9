"""Kernels for CPUs in C++, compiled for the machine at hand when they are first needed.

Every kernel stands beside a torch reference, which runs where there is no compiler.
"""

from specdec.kernels.native.library import native_library
from specdec.kernels.native.matrix import MatrixFormat, MatrixStruct, PackedMatrix

__all__ = ["MatrixFormat", "MatrixStruct", "PackedMatrix", "native_library"]
