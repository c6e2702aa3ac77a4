"""Report on earlier runs."""
