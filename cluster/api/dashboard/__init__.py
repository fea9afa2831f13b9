"""The dashboard at /dashboard and its event stream.

The files under `static` are served without a build step. Changes go through the admin interface
in `api.http`.
"""

from cluster.api.dashboard.routes import make_dashboard

__all__ = ["make_dashboard"]
