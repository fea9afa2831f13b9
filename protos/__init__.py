"""gRPC API of the service: the .proto files and the stubs generated from them."""
