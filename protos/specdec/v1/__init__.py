"""Protobuf package `specdec.v1`."""
