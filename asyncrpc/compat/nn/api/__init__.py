"""Where torch.distributed.nn keeps its remote module, and programs import it from."""
