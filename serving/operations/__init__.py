"""Operator interfaces: status, probes, `doctor`, generated pages."""
