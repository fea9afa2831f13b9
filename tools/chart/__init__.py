"""Generates the files of k8s/ that derive from the chart's values and from the service."""
