"""Ranks and bytes between them; knows no models."""
