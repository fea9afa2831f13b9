"""Makes what is under deploy/ for Grafana and Prometheus."""
