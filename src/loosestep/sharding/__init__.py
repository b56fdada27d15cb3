"""Optimizers that share state between ranks."""
