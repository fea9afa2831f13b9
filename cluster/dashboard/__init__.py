"""The operators' page at /dashboard; docs/dashboard.md shows it."""

from cluster.dashboard.routes import make_dashboard

__all__ = ["make_dashboard"]
