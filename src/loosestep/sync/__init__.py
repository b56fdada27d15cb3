"""The average of a set of tensors: agree, launch, wait, commit."""
