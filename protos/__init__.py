"""The service's gRPC API: the .proto files, and the stubs that the build generates beside them."""
