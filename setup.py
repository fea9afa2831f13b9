"""Generates the gRPC stubs before each build; the other metadata is in pyproject.toml."""

from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError


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


class BuildWithStubs(build_py):
    """The standard build, preceded by the generation of the stubs."""

    def run(self) -> None:
        """Generate the stubs, then build."""
        self.run_command("generate_stubs")
        super().run()


setup(cmdclass={"build_py": BuildWithStubs, "generate_stubs": GenerateStubs})
