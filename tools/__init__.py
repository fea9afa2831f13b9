"""What makes and looks after files that are not code of the service."""
