"""Development tools: generators and checks of files that are not code of the service."""
