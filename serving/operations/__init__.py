"""What operators ask and run: status, probes, `doctor`, generated pages."""
