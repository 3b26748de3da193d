"""Fused attention and rotary positions."""
