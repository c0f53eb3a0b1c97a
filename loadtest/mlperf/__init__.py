"""MLPerf's own load generator against the server: four scenarios, two modes, and the folders of a submission."""
