"""Report on earlier runs and measurements."""
