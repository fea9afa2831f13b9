"""Makes what a person would forget to keep in step in k8s/specdec."""
