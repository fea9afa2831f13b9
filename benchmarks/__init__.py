"""What proves that the service is lossless, and what measures its speed."""
