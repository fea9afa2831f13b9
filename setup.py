"""Generates the gRPC stubs before every build; all else is in pyproject.toml."""

from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError


class GenerateStubs(Command):
    """Writes the Python stubs of every .proto beside it, where editable installs find them too."""

    description = "generate the gRPC stubs from protos/"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        """Takes no options."""

    def finalize_options(self) -> None:
        """Takes no options."""

    def run(self) -> None:
        """Runs protoc from the project's root, so that stubs import each other as `protos...`."""
        # Imported here: reading the metadata must not need the generator.
        import grpc_tools
        from grpc_tools import protoc

        well_known = Path(grpc_tools.__file__).parent / "_proto"
        files = sorted(path.as_posix() for path in Path("protos").rglob("*.proto"))
        outputs = ["--python_out=.", "--pyi_out=.", "--grpc_python_out=."]
        if protoc.main(["protoc", "-I.", f"-I{well_known}", *outputs, *files]) != 0:
            raise ExecError("protoc failed; its messages are above")


class BuildWithStubs(build_py):
    """The usual build, after the stubs exist for it to collect."""

    def run(self) -> None:
        """Generates, then builds."""
        self.run_command("generate_stubs")
        super().run()


setup(cmdclass={"build_py": BuildWithStubs, "generate_stubs": GenerateStubs})
