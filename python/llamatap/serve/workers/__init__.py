"""Model workers: one thread for each model, which batches the requests of all clients."""
