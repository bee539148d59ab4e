"""The exact step."""
