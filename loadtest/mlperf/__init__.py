"""MLPerf LoadGen against the server: four scenarios and two modes."""
