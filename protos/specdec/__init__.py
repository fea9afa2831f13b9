"""Protobuf package `specdec`, a folder a version."""
