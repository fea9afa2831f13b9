"""Hides the package of this name from the tests and the processes that they start.

Each process that imports Ray imports jsonschema, which imports that package if it is there: it
compiles 38 grammars of internationalized addresses, for two seconds. The SBOM generator of a
development environment depends on it; an installed service does not have it. Nothing here
validates the formats `iri` and `iri-reference`.
"""

raise ImportError("hidden from tests by tests/conftest.py")
