"""Tests of the running service, a package so that its services end with its last test."""
