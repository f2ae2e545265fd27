"""The backend of torch.distributed; its public name is `asyncrpc.torch_backend`."""
