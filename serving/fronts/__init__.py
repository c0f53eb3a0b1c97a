"""Front processes: connections, texts and answers, before the core process with its one scheduler."""
