"""Sharing gradients while backward runs."""
