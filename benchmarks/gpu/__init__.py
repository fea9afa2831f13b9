"""Parts of `make gpu-check`, each in a module with its measurements."""
