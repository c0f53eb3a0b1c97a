"""The policy for request fields that the server does not read: the rule, and the fields that protocols document."""
