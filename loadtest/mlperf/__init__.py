"""MLPerf's own load generator against the server: four scenarios and two modes."""
