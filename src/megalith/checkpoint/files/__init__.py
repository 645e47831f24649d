"""Files of checkpoints: hashed, durable, in the containers of torch.save and torch.distributed.checkpoint."""
