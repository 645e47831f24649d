"""Compatibility with Megatron-LM: console lines, tools under its flags, and launch scripts."""
