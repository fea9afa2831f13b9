"""The endpoint picker of Gateway API's inference extension.

A separate process, without Ray and torch, that chooses a replica for each request of an Envoy
proxy: scraping of the replicas, the choice, the gRPC service that the proxy calls, and the list of
pods from Kubernetes. The choice of Ray Serve's proxies is in `cluster.serve`.
"""
