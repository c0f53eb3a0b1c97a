"""Which fields a request may bring beside those that are read: the rule, and what the protocols' owners document."""
