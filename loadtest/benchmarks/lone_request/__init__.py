"""One request at a time: what the server adds to its wire where nothing is computed."""
