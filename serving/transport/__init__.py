"""The wire: one package a protocol family."""
