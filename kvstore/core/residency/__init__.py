"""Residency: what the core believes of each slower tier."""
