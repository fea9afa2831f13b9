"""Generates the gRPC stubs before each build; the other metadata is in pyproject.toml.

With SPECDEC_PRECOMPILE_KERNELS=1 a wheel also contains the CPU kernels, compiled for groups of
processors of the architecture of this machine, and its tag names the platform.
"""

import os
import platform
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

KERNELS = Path("specdec", "kernels", "cpu")
SOURCE = KERNELS / "source"
PRECOMPILED = KERNELS / "precompiled"


def precompiles() -> bool:
    """Return whether the build compiles the kernels."""
    return os.environ.get("SPECDEC_PRECOMPILE_KERNELS", "0") not in ("", "0")


def load_module(path: Path) -> Any:
    """Return a module of the package, loaded without the package, which needs torch."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


class GenerateStubs(Command):
    """Command that generates the stubs of each .proto beside it, also for editable installs."""

    description = "generate the gRPC stubs from protos/"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        """Do nothing: the command has no options."""

    def finalize_options(self) -> None:
        """Do nothing: the command has no options."""

    def run(self) -> None:
        """Run protoc from the project's root, so that stubs import each other as `protos...`.

        Raises ExecError if protoc fails.
        """
        # Imported here, so that reading the metadata does not require the generator.
        import grpc_tools
        from grpc_tools import protoc

        well_known = Path(grpc_tools.__file__).parent / "_proto"
        files = sorted(path.as_posix() for path in Path("protos").rglob("*.proto"))
        outputs = ["--python_out=.", "--pyi_out=.", "--grpc_python_out=."]
        if protoc.main(["protoc", "-I.", f"-I{well_known}", *outputs, *files]) != 0:
            raise ExecError("protoc failed; see its messages above")


class PrecompileKernels(Command):
    """Command that compiles the kernels for each group of processors into the build directory."""

    description = "compile the CPU kernels for groups of processors"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        """Do nothing: the command has no options."""

    def finalize_options(self) -> None:
        """Do nothing: the command has no options."""

    def run(self) -> None:
        """Compile all variants of this machine's architecture.

        Raises ExecError if it has none, or a compilation fails.
        """
        compiler, variants = (
            load_module(KERNELS / name) for name in ("compiler.py", "variants.py")
        )
        machine = platform.machine()
        if machine not in variants.VARIANTS:
            known = ", ".join(variants.VARIANTS)
            raise ExecError(f"no precompiled kernels for {machine}; there are some for {known}")
        directory = Path(self.get_finalized_command("build_py").build_lib, PRECOMPILED)
        directory.mkdir(parents=True)
        digest = variants.source_digest(SOURCE)
        for each in variants.VARIANTS[machine]:
            flags = variants.compiler_flags(*each.march)
            self.announce(f"compiling the kernels for {each.name}", level=2)
            with TemporaryDirectory() as objects:
                library = Path(objects, each.library_name(digest))
                try:
                    compiler.compile_library(
                        compiler.find_compiler(), SOURCE, library, flags, variants.STATIC_FLAGS
                    )
                except compiler.CompileError as error:
                    raise ExecError(str(error)) from error
                self.copy_file(str(library), str(directory / library.name))


class BuildWithStubs(build_py):
    """The standard build, preceded by the generation of the stubs and followed by the kernels."""

    def run(self) -> None:
        """Generate the stubs, build, and compile the kernels if that is requested."""
        self.run_command("generate_stubs")
        shutil.rmtree(Path(self.build_lib, PRECOMPILED), ignore_errors=True)  # of a former build
        super().run()
        if precompiles() and not self.editable_mode:
            self.run_command("precompile_kernels")


class PlatformWheel(bdist_wheel):
    """The standard wheel, whose tag names the platform if it contains kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag: any Python 3, since the kernels do not use Python."""
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if precompiles() else tag


class PlatformDistribution(Distribution):
    """The distribution, which is installed beside compiled modules if it contains kernels."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel belongs to a platform."""
        return precompiles()


setup(
    distclass=PlatformDistribution,
    cmdclass={
        "build_py": BuildWithStubs,
        "bdist_wheel": PlatformWheel,
        "generate_stubs": GenerateStubs,
        "precompile_kernels": PrecompileKernels,
    },
)
