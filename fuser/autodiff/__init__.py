"""Derivatives of groups."""
