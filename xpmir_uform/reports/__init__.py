"""Reports: tables and pictures of what runs produced."""
