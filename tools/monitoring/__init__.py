"""Generate the Grafana dashboard and the Prometheus files under deploy/."""
