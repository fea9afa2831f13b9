"""The cluster service: Ray actors, Serve deployments, gRPC and HTTP ingress, and the CLI."""
