"""Protobuf package `specdec`, with one folder per version."""
