"""CPU kernels in C++, compiled for the machine on first use.

The Python that builds, loads and calls them is here; the C++ is in the folders of `source`, one for
each purpose. Every kernel has a torch reference, which runs where no compiler is available. Model
structure belongs in `models.cpu_decoder`.
"""

from specdec.kernels.cpu.build import native_library, native_library_fault
from specdec.kernels.cpu.matrix import PANEL_OUTPUTS, MatrixFormat, MatrixStruct, PackedMatrix
from specdec.kernels.cpu.shared_memory import SharedMemory

__all__ = [
    "PANEL_OUTPUTS",
    "MatrixFormat",
    "MatrixStruct",
    "PackedMatrix",
    "SharedMemory",
    "native_library",
    "native_library_fault",
]
