"""jhybrid_server: the engine of `jhybrid`, served over gRPC, and its clients."""
