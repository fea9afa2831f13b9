"""The operators' page at /dashboard; docs/dashboard.md shows it."""

from cluster.api.dashboard.routes import make_dashboard

__all__ = ["make_dashboard"]
