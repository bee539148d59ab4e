"""The trainer and the exact step."""
