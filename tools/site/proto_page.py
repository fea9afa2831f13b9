"""Generates the gRPC API reference as Markdown from the protos and their comments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

_HEAD = """# gRPC API

Generated from the protos, which the service also publishes by server reflection.
[Clients](../clients.md) has examples and the compatibility rules.
"""
# Field numbers in descriptor.proto, which form the paths of SourceCodeInfo.Location.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_MEMBERS = 2  # methods of a service, fields of a message, values of an enum
_SCALARS = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()
}


def proto_page(root: Path) -> str:
    """Generate the page: every service, message and enum of `specdec` under `root`, in file order.

    Raises ValueError if protoc fails.
    """
    files = _read(root, sorted(root.glob("specdec/**/*.proto"), reverse=True))
    return "\n".join([_HEAD, *(line for file in files for line in _FilePage(file).lines())]) + "\n"


def _read(root: Path, paths: Sequence[Path]) -> list[FileDescriptorProto]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "descriptors"
        flags = ["--include_source_info", f"--descriptor_set_out={output}", f"-I{root}"]
        well_known = Path(protoc.__file__).parent / "_proto"
        code = protoc.main(["protoc", *flags, f"-I{well_known}", *map(str, paths)])
        if code != 0:
            raise ValueError(f"protoc failed on the protos under {root}")
        return list(FileDescriptorSet.FromString(output.read_bytes()).file)


class _FilePage:
    """The part of the page that documents one proto file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): location.leading_comments
            for location in file.source_code_info.location
            if location.leading_comments
        }

    def lines(self) -> Iterator[str]:
        for index, service in enumerate(self._file.service):
            yield from self._service(service, (_SERVICES, index))
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (_MESSAGES, index))
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (_ENUMS, index))

    def _service(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield f"## {self._file.package}.{service.name}\n"
        yield self._paragraphs(path)
        for index, method in enumerate(service.method):
            stream = "stream of " if method.server_streaming else ""
            request, response = map(_link, (method.input_type, method.output_type))
            yield f"### {method.name}\n"
            yield f"{request} → {stream}{response}\n"
            yield self._paragraphs((*path, _MEMBERS, index))

    def _message(self, message: DescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield f"### {message.name}\n"
        yield self._paragraphs(path)
        if message.field:
            yield "| field | type | |\n|---|---|---|"
        for index, field in enumerate(message.field):
            comment = self._cell((*path, _MEMBERS, index))
            yield f"| `{field.name}` = {field.number} | {_kind(field, message)} | {comment} |"
        yield ""

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield f"### {enum.name}\n"
        yield self._paragraphs(path)
        yield "| value | |\n|---|---|"
        for index, value in enumerate(enum.value):
            comment = self._cell((*path, _MEMBERS, index))
            yield f"| `{value.name}` = {value.number} | {comment} |"
        yield ""

    def _paragraphs(self, path: tuple[int, ...]) -> str:
        """Return a comment as Markdown; indented parts, such as tables, become code blocks."""
        lines = [line.removeprefix(" ") for line in self._comments[path].splitlines()]
        return "\n".join(_blocks(lines))

    def _cell(self, path: tuple[int, ...]) -> str:
        words = " ".join(self._comments[path].split())
        return _escape(words).replace("|", "\\|")


def _blocks(lines: Sequence[str]) -> Iterator[str]:
    is_table = False
    for line in lines:
        if line.startswith("  ") != is_table:
            is_table = not is_table
            yield "\n```text" if is_table else "```\n"
        yield line if is_table else _escape(line)
    yield "```\n" if is_table else ""


def _kind(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        return f"map of {_type(entry.field[0])} to {_type(entry.field[1])}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {_type(field)}"
    if field.HasField("oneof_index") and not field.proto3_optional:
        return f"{_type(field)}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return f"{_type(field)}, optional" if field.proto3_optional else _type(field)


def _type(field: FieldDescriptorProto) -> str:
    return _link(field.type_name) if field.type_name else f"`{_SCALARS[field.type]}`"


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    is_foreign = type_name.startswith(".google.")
    return f"`{type_name[1:]}`" if is_foreign else f"[`{name}`](#{name.lower()})"


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[").replace("_", "\\_")
