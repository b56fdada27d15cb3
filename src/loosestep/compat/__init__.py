"""The names of ``torch.distributed`` for averaging."""
