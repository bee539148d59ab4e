"""The report of one run: what its job folder says, as a page and a picture."""
