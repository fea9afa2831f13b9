"""The operators' page at /dashboard, and its data feed.

The files under `static` are served as they are; there is no build. Changes go through the admin
interface in `api.http`.
"""

from cluster.api.dashboard.routes import make_dashboard

__all__ = ["make_dashboard"]
