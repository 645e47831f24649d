"""Megatron-LM's borders: its console lines."""
